"""The paper's figures from a grid's runs, one function per kind."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.plots import COLOURS, PAGE, STYLE, Line, line_on, picture
from fedtail.report.comparison import Contender
from fedtail.runs.record import RunRecord
from fedtail_experiments.paper.tables import GridResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: GridResult) -> Figure:
    """The figure that a grid declares itself to be."""
    figure = KINDS[result.grid.kind](result)
    title = textwrap.fill(result.grid.title, int(13 * figure.get_figwidth()))  # about 13 bold letters per inch
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def save_figure(folder: Path, drawn: Callable[[], Figure]) -> list[Path]:
    """Draw in the common style and write ``figure.svg`` and ``figure.png``."""
    from matplotlib import rc_context

    written = [folder / "figure.svg", folder / "figure.png"]
    with rc_context(STYLE):
        figure = drawn()
        for path in written:
            figure.savefig(path, bbox_inches="tight", dpi=150)
    return written


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """Return a figure and its axes (rows, columns)."""
    figure = picture(*size)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _panels(result: GridResult, rows: int = 1) -> tuple[Figure, dict[tuple[str, str], Any]]:
    """One column of axes per (block, column) of the grid that has runs."""
    present = {(p.block, p.column) for p in result.runs}
    keys = [key for key in itertools.product(result.used("block"), result.used("column")) if key in present]
    width = max(PAGE, 3.2 * len(keys)) if len(keys) > 1 else 4.2
    figure, axes = subplots(rows, len(keys), (width, 2.6 * rows + 0.3))
    for i, (block, column) in enumerate(keys):
        axes[0, i].set_title(column if block == "all" else f"{column}, {block}")
    return figure, {key: axes[:, i] for i, key in enumerate(keys)}


def _runs(result: GridResult, block: str, column: str, row: str) -> list[RunRecord]:
    return [r for p, r in result.runs.items() if (p.block, p.column, p.row) == (block, column, row)]


def _band(ax: Any, runs: list[RunRecord], curve: str, label: str, colour: int, *, dashed: bool = False) -> None:
    t, mean, spread = Contender(label, tuple(runs)).band(curve)
    if t.size:
        line_on(ax, Line(label, colour, t + 1, mean, spread), dashed=dashed)


def _curves(result: GridResult) -> Figure:
    figure, panels = _panels(result)
    metric = result.grid.metric
    first = next(iter(panels.values()))[0]
    for (block, column), (ax,) in panels.items():
        if ax is not first:
            ax.sharey(first)
        for i, row in enumerate(result.used("row")):
            _band(ax, _runs(result, block, column, row), f"test.{metric}", row, i)
        ax.set_xlabel("round")
    first.set_ylabel(f"test {metric.replace('_', ' ')}")
    first.legend()
    return figure


def _losses(result: GridResult) -> Figure:
    figure, panels = _panels(result, rows=2)
    for (block, column), axes in panels.items():
        for i, row in enumerate(result.used("row")):
            runs = _runs(result, block, column, row)
            _band(axes[0], runs, "train_loss", row, i)
            _band(axes[0], runs, "validation_loss", "", i, dashed=True)
            _band(axes[1], runs, "validation.accuracy", row, i)
        axes[0].set_ylabel("loss (dashed: validation)")
        axes[1].set_ylabel("validation accuracy")
        axes[1].set_xlabel("round")
        axes[0].legend()
    return figure


def _threshold(result: GridResult) -> Figure:
    figure, panels = _panels(result)
    for (block, column), (ax,) in panels.items():
        found = []
        for row in result.used("row"):
            entry = result.entry(block, row, column)
            if row.startswith("minority=") and entry is not None and entry.values:
                found.append((int(row.removeprefix("minority=")), entry.mean, entry.spread))
        if found:
            x, mean, spread = map(np.array, zip(*found, strict=True))
            ax.errorbar(x, mean, yerr=np.nan_to_num(spread), color=COLOURS[1], marker="o", markersize=3, capsize=2)
        rule = result.entry(block, "rule", column)
        if rule is not None and rule.values:
            ax.axhline(rule.mean, color=COLOURS[2], linewidth=1, label=f"rule, per client: {rule.mean:.3f}")
        chosen = [n for run in _runs(result, block, column, "rule") for n in minority_sizes(run)]
        if chosen:
            low, high = min(chosen), max(chosen)
            ax.axvspan(low - 0.15, high + 0.15, color=COLOURS[2], alpha=0.15, linewidth=0, label="chosen by the rule")
        ax.legend()
        ax.set_xlabel("classes in the minority group")
        ax.set_ylabel("test accuracy")
    return figure


def minority_sizes(run: RunRecord) -> list[int]:
    """How many classes the variance rule puts into each client's minority group, at the run's rates."""
    rates = np.broadcast_to(run.rate_path()[-1], len(run.clients["label_map"]))
    groups = [
        group_classes(resampled_counts(counts, r)) for counts, r in zip(run.clients["label_map"], rates, strict=True)
    ]
    return [int((g == 1).sum()) for g in groups]


def _rates(result: GridResult) -> Figure:
    figure, panels = _panels(result, rows=len(result.used("row")))
    for (block, column), axes in panels.items():
        for ax, row in zip(axes, result.used("row"), strict=False):
            runs = _runs(result, block, column, row)
            if runs:
                path = runs[0].rate_path()
                for k in range(path.shape[1]):
                    shift = 0.002 * (k - path.shape[1] / 2)  # clients at the same rate stay visible
                    ax.step(
                        np.arange(1, len(path) + 1), path[:, k] + shift, where="mid", color=COLOURS[k % len(COLOURS)]
                    )
            ax.set_ylabel(f"{row}: rate")
            ax.set_ylim(0.38, 0.82)
        axes[-1].set_xlabel("round")
    return figure


def _alignment(result: GridResult) -> Figure:
    figure, panels = _panels(result, rows=2)
    for (block, column), axes in panels.items():
        runs = _runs(result, block, column, result.used("row")[0])
        _band(axes[0], runs, "alignment", "FedCGNM", 2)
        _band(axes[0], runs, "sgd_alignment", "SGD from the same model", 0)
        axes[0].set_ylabel("mean cosine to the aggregate")
        axes[0].legend()
        for run in runs:
            t, ours = run.curve("alignment")
            _, plain = run.curve("sgd_alignment")
            axes[1].bar(t + 1, ours - plain, color=COLOURS[2], alpha=1 / len(runs), width=1.0)
        axes[1].axhline(0, color="#333", linewidth=0.6)
        axes[1].set_ylabel("FedCGNM minus SGD")
        axes[1].set_xlabel("round")
    return figure


def _per_class(result: GridResult) -> Figure:
    figure, panels = _panels(result)
    for (block, column), (ax,) in panels.items():
        rows = result.used("row")
        data = [np.concatenate([r.per_class() for r in _runs(result, block, column, row)]) for row in rows]
        ax.hist(data, bins=np.linspace(0, 1, 11).tolist(), label=rows, color=list(COLOURS[: len(rows)]))
        ax.set_xlabel("test accuracy of a class")
        ax.set_ylabel("classes (all seeds)")
        ax.legend()
    return figure


def _assumption(result: GridResult) -> Figure:
    figure, panels = _panels(result, rows=2)
    for (block, column), axes in panels.items():
        run = _runs(result, block, column, result.used("row")[0])[0]
        t = [r["round"] + 1 for r in run.history if "assumption" in r]
        for ax, key, label in zip(axes, ("cosine", "gap"), ("cos(gradient, momentum)", "magnitude gap"), strict=True):
            table = np.array(
                [[np.nan if v is None else v for v in r["assumption"][key]] for r in run.history if "assumption" in r],
                dtype=np.float64,
            )
            for h in range(table.shape[1]):
                ax.plot(t, table[:, h], color=COLOURS[h + 1], label=f"group {h}" + (" (majority)" if h == 0 else ""))
            ax.set_ylabel(label)
        axes[0].legend()
        axes[1].set_ylim(bottom=0)
        axes[1].set_xlabel("round")
    return figure


KINDS: dict[str, Callable[[GridResult], Figure]] = {
    "curves": _curves,
    "losses": _losses,
    "threshold": _threshold,
    "rates": _rates,
    "alignment": _alignment,
    "per-class": _per_class,
    "assumption": _assumption,
}
