"""Vector figures for papers (PDF or SVG), one file each, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.report.comparison import Comparison
from fedtail.report.series import palette, thirds
from fedtail.runs.plotting import COLOURS, COLUMN, PAGE, STYLE
from fedtail.runs.record import RunRecord


def write_figures(compared: Sequence[Comparison], folder: Path, suffix: str) -> list[Path]:
    """Write every figure that the runs have numbers for, as ``<figure>.<suffix>``; a subfolder per comparison."""
    from matplotlib import rc_context

    written = []
    for i, comparison in enumerate(compared):
        place = folder / f"problem-{i + 1}" if len(compared) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        with rc_context(STYLE):
            for name, draw in FIGURES.items():
                figure = draw(comparison)
                if figure is None:
                    continue
                path = place / f"{name}.{suffix}"
                # without dates the same runs give the same bytes
                metadata = {"CreationDate": None} if suffix == "pdf" else {"Date": None}
                figure.savefig(path, metadata=metadata, bbox_inches="tight", pad_inches=0.02)
                written.append(path)
    return written


def _canvas(width: float = COLUMN, height: float = 2.2) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _colour(index: int) -> str:
    return COLOURS[index] if index < len(COLOURS) else COLOURS[1 + (index - 1) % 7]


def _curve(name: str, label: str) -> Callable[[Comparison], Any]:
    def draw(comparison: Comparison) -> Any:
        figure, ax = _canvas()
        colours, drawn = palette(comparison), False
        for contender in comparison.contenders:
            t, mean, spread = contender.band(name)
            if not t.size or not np.isfinite(mean).any():
                continue
            c, drawn = _colour(colours[contender.label]), True
            style = "--" if colours[contender.label] >= len(COLOURS) else "-"
            ax.plot(t + 1, mean, color=c, label=contender.label, linestyle=style)
            if len(contender.runs) > 1:
                low, high = mean - spread, mean + spread
                if name.startswith("test."):
                    low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
                ax.fill_between(t + 1, low, high, color=c, alpha=0.16, linewidth=0)
        ax.set(xlabel="round", ylabel=label)
        if len(comparison.contenders) > 1:
            ax.legend()
        return figure if drawn else None

    return draw


def _scored(comparison: Comparison) -> RunRecord | None:
    """The first run that was evaluated."""
    return next((r for r in comparison.runs if r.per_class().size), None)


def _per_class(comparison: Comparison) -> Any:
    first = _scored(comparison)
    if first is None:
        return None
    n = first.per_class().size
    counts = first.train_counts
    order = np.argsort(-counts, kind="stable") if counts is not None else np.arange(n)
    figure, ax = _canvas(PAGE, 2.2)
    colours = palette(comparison)
    for i, contender in enumerate(comparison.contenders):
        stack = np.array([r.per_class()[order] for r in contender.runs if r.per_class().size == n])
        if not stack.size:
            continue
        at = np.arange(n) + (i - (len(comparison.contenders) - 1) / 2) * 0.6 / len(comparison.contenders)
        c = _colour(colours[contender.label])
        spread = stack.std(axis=0, ddof=1) if len(stack) > 1 and n <= 40 else None
        ax.errorbar(
            at, stack.mean(axis=0), yerr=spread, fmt="o", color=c, markersize=3.5, elinewidth=0.9, label=contender.label
        )
    if counts is not None:
        behind = ax.twinx()
        behind.bar(np.arange(n), counts[order], color="#67707d", alpha=0.13, width=0.84)
        behind.set_ylabel("training samples")
        behind.grid(False)
        behind.spines["right"].set_visible(True)
        ax.set_zorder(behind.get_zorder() + 1)
        ax.patch.set_visible(False)
    ax.set(ylim=(0, 1.03), xlabel="class, most training samples first", ylabel="accuracy")
    if n <= 20:
        names = [first.classes[c] for c in order]
        turn = {"rotation": 35, "ha": "right"} if max(map(len, names)) > 4 else {}
        ax.set_xticks(np.arange(n), names, **turn)
    if len(comparison.contenders) > 1:
        figure.legend(loc="outside upper center", ncols=min(len(comparison.contenders), 5))
    return figure


def _groups(comparison: Comparison) -> Any:
    first = _scored(comparison)
    if first is None or first.per_class().size < 3 or first.train_counts is None:
        return None
    n = first.per_class().size
    figure, ax = _canvas()
    order = np.argsort(-first.train_counts, kind="stable")
    colours = palette(comparison)
    names = ["head", "middle", "tail"] if n > 2 * (n // 3) else ["head", "tail"]
    width = 0.78 / len(comparison.contenders)
    for i, contender in enumerate(comparison.contenders):
        found = [r.per_class()[order] for r in contender.runs if r.per_class().size == n]
        if not found:
            continue
        parts = thirds(np.array(found))
        at = np.arange(len(names)) + (i - (len(comparison.contenders) - 1) / 2) * width
        mean, spread = parts.mean(axis=0), parts.std(axis=0, ddof=1) if len(parts) > 1 else None
        c = _colour(colours[contender.label])
        ax.bar(at, mean, width * 0.94, yerr=spread, color=c, label=contender.label, error_kw={"elinewidth": 0.8})
    ax.set_xticks(np.arange(len(names)), names)
    ax.set(ylim=(0, 1.03), ylabel="accuracy")
    if len(comparison.contenders) > 1:
        figure.legend(loc="outside upper center", ncols=min(len(comparison.contenders), 3))
    return figure


def _rates(comparison: Comparison) -> Any:
    moving = [one for one in comparison.contenders if np.ptp(one.runs[0].rate_path(), axis=0).max() > 1e-12]
    if not moving:
        return None
    from matplotlib.figure import Figure

    columns = min(len(moving), 2)
    rows = math.ceil(len(moving) / columns)
    figure = Figure(figsize=(COLUMN if columns == 1 else PAGE, 2.0 * rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, sharey=True, squeeze=False)).ravel()
    for ax, contender in zip(panels, moving, strict=False):
        run = contender.runs[0]
        path = run.rate_path()
        sites = run.clients.get("sites") or [str(k) for k in range(path.shape[1])]
        for k in range(path.shape[1]):
            many = path.shape[1] > len(COLOURS)
            look = {"alpha": 0.5, "linewidth": 0.8} if many else {"linewidth": 1.3, "label": sites[k]}
            ax.step(np.arange(1, len(path) + 1), path[:, k], where="post", color=_colour(k), **look)
        end = run.search_rounds()
        if 0 < end < len(path):
            ax.axvline(end, color="#67707d", linestyle=":", linewidth=0.9)
        ax.set(title=f"{contender.label}, seed {run.seed}", xlabel="round", ylabel="resampling rate")
        if path.shape[1] <= len(COLOURS):
            ax.legend(ncols=2)
    for ax in panels[len(moving) :]:
        ax.set_visible(False)
    return figure


def _label_map(comparison: Comparison) -> Any:
    run = comparison.runs[0]
    table = run.label_map
    if table is None:
        return None
    order = np.argsort(-table.sum(0), kind="stable")
    figure, ax = _canvas(COLUMN, min(0.7 + 0.2 * len(table), 4.5))
    image = ax.imshow(np.sqrt(table[:, order]), cmap="Blues", aspect="auto", vmin=0)
    ax.grid(False)
    sites = [str(s) for s in run.clients.get("sites") or range(len(table))]
    if len(sites) <= 20:
        ax.set_yticks(range(len(sites)), sites)
    if table.shape[1] <= 12:
        names = [run.classes[c] for c in order]
        ax.set_xticks(range(len(names)), names, **({"rotation": 40, "ha": "right"} if max(map(len, names)) > 4 else {}))
    ax.set(xlabel="class, most training samples first", ylabel="client")
    bar = figure.colorbar(image, ax=ax, label="training samples", fraction=0.05)
    at = np.unique(np.round(np.linspace(0, math.sqrt(max(float(table.max()), 1)), 4)))
    bar.set_ticks(at.tolist(), labels=[f"{v**2:.0f}" for v in at])
    return figure


FIGURES: dict[str, Callable[[Comparison], Any]] = {
    "macro-f1": _curve("test.macro_f1", "macro F1"),
    "tail-accuracy": _curve("test.tail", "accuracy of the rarest third"),
    "accuracy": _curve("test.accuracy", "accuracy"),
    "train-loss": _curve("train_loss", "training loss"),
    "alignment": _curve("alignment", "mean cosine to the aggregate"),
    "per-class": _per_class,
    "groups": _groups,
    "rates": _rates,
    "label-map": _label_map,
}
