"""``result.plot(...)``: what came of a run as matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError, one_of
from fedtail.runs.plotting import COLOURS, COLUMN, PAGE, STYLE

if TYPE_CHECKING:
    from fedtail.runs.result import Result

GREY = COLOURS[0]
MOST_NAMES, MOST_CURVES = 20, 7
"""Classes or sites that are named below a figure, and classes whose curves are drawn: the rarest."""


def draw(result: Result, kind: str, metric: str) -> Any:
    """A figure of ``kind``; see ``PLOTS``."""
    if kind not in PLOTS:
        raise one_of("plot", kind, PLOTS)
    METRICS[metric]
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise FedtailError("figures need matplotlib: pip install 'fedtail[figures]'") from None
    with rc_context(STYLE):
        wide = kind in ("classes", "sites")
        figure = Figure(
            figsize=(PAGE if wide else COLUMN, 2.4 if wide or kind == "curves" else 3.0), layout="constrained"
        )
        PLOTS[kind](result, figure.add_subplot(), metric)
    return figure


def _curves(result: Result, ax: Any, metric: str) -> None:
    """A metric over rounds, with the worst site of the private splits."""
    for i, split in enumerate(("test", "validation")):
        points = [(r["round"] + 1, r[split].get(metric)) for r in result.history if r.get(split)]
        _line(ax, points, COLOURS[1 - i], split)
    told = [(r["round"] + 1, r["sites"]["worst"]) for r in result.history if r.get("sites", {}).get("metric") == metric]
    _line(ax, told, COLOURS[2], "worst site")
    if metric in result.floor:
        ax.axhline(result.floor[metric], color=GREY, linestyle=":", linewidth=0.9, label="majority only")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="round", ylabel=METRICS[metric].words)
    ax.legend()


def _line(ax: Any, points: Sequence[tuple[int, float | None]], colour: str, label: str) -> None:
    known = [(t, v) for t, v in points if v is not None and np.isfinite(v)]
    if known:
        ax.plot(*zip(*known, strict=True), color=colour, label=label)


def _classes(result: Result, ax: Any, metric: str) -> None:
    """Precision and recall of each class, the commonest first."""
    recall = np.array(result.test["per_class_accuracy"], dtype=float)
    precision = result.test.get("per_class_precision")
    counts = result.about.train_counts
    order = np.arange(len(recall)) if counts is None else np.argsort(-counts, kind="stable")
    place, wide = np.arange(len(order)), 0.8 if precision is None else 0.4
    ax.bar(place if precision is None else place - 0.2, recall[order], wide, color=COLOURS[1], label="recall")
    if precision is not None:
        ax.bar(place + 0.2, np.array(precision, dtype=float)[order], wide, color=GREY, label="precision")
    _names(ax, [f"{result.about.classes[c]}" + ("" if counts is None else f"\n{counts[c]:,}") for c in order])
    ax.set(ylim=(0, 1.03), xlabel="class" if counts is None else "class and its training samples")
    _legend_above(ax)


def _sites(result: Result, ax: Any, metric: str) -> None:
    """A metric of each site, the worst first: on its own test set, where it has one, and before thresholds."""
    split = result.worst.get("split", "validation")
    rows = [r for r in result.sites if r.get(split) and np.isfinite(r[split].get(metric, np.nan))]
    if not rows:
        raise FedtailError("nothing to draw: the sites do not share their results, or have no samples")
    sign = 1 if METRICS[metric].higher_is_better else -1
    rows.sort(key=lambda r: sign * r[split][metric])
    values, place = np.array([r[split][metric] for r in rows]), np.arange(len(rows))
    own = "their own test sets" if split == "test" else "private splits"
    ax.bar(place, values, 0.7, color=COLOURS[1], label=f"on {own}")
    if "before" in rows[0]:
        before = [r["before"].get(split, {}).get(metric, np.nan) for r in rows]
        ax.plot(place, before, "_", color=COLOURS[2], markersize=12, markeredgewidth=2, label="likeliest class")
    ax.axhline(values.mean(), color=GREY, linestyle=":", linewidth=0.9, label=f"mean {values.mean():.3f}")
    _names(ax, [str(r["site"]) for r in rows])
    ax.set(xlabel="site, worst first", ylabel=METRICS[metric].words)
    _legend_above(ax)


def _reliability(result: Result, ax: Any, metric: str) -> None:
    """How often the top class is right, by how likely it was said to be."""
    told = _told(result)
    ax.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=0.9, label="perfect calibration")
    for key, colour, label in (
        ("reliability_before", COLOURS[2], "before calibration"),
        ("reliability", COLOURS[1], "model"),
    ):
        if key in told:
            bins = told[key]
            share = np.array(bins["samples"]) / max(sum(bins["samples"]), 1)
            ax.plot(bins["probability"], bins["accuracy"], color=colour, label=label)
            ax.scatter(bins["probability"], bins["accuracy"], 4 + 160 * share, color=colour, linewidths=0)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="predicted probability", ylabel="fraction correct")
    ax.legend(loc="upper left")


def _pr(result: Result, ax: Any, metric: str) -> None:
    """Precision against recall of the rarest classes."""
    curves = _told(result)["pr"]
    areas = dict(zip(result.about.classes, result.test.get("per_class_pr_auc", []), strict=False))
    counts = result.about.train_counts
    support = dict(
        zip(result.about.classes, result.test.get("per_class_support", []) if counts is None else counts, strict=False)
    )
    rarest = sorted(curves, key=lambda name: support.get(name, 0))[:MOST_CURVES]
    for i, name in enumerate(rarest):
        area = areas.get(name, np.nan)
        label = f"{name} ({area:.2f})" if np.isfinite(area) else name
        ax.plot(curves[name]["recall"], curves[name]["precision"], color=COLOURS[(i + 1) % len(COLOURS)], label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    ax.legend(title="class (PR-AUC)", title_fontsize=7)


PLOTS: dict[str, Callable[[Result, Any, str], None]] = {
    "curves": _curves,
    "classes": _classes,
    "sites": _sites,
    "reliability": _reliability,
    "pr": _pr,
}
"""What ``result.plot`` draws."""


def _told(result: Result) -> dict[str, Any]:
    """Curves on test samples, or where there are none on private splits."""
    if not result.curves:
        raise FedtailError("nothing to draw: the sites do not share probability counts")
    return dict(result.curves.get("test") or result.curves["validation"])


def _names(ax: Any, names: Sequence[str]) -> None:
    if len(names) > MOST_NAMES:
        ax.set_xticks([])
        return
    crowded = sum(max(map(len, name.split("\n"))) + 2 for name in names) > 100
    ax.set_xticks(np.arange(len(names)), names, rotation=35 if crowded else 0, ha="right" if crowded else "center")


def _legend_above(ax: Any) -> None:
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
