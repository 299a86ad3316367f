"""Table and figure of the convergence experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtail.runs.plotting import COLOURS, PAGE, STYLE
from fedtail.study.paper.convergence import PATHS, Point

HEADER = ("delta", "rates", "T", "V_T", "mean ||grad||^2", "last quarter")


def convergence_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """One row per stabiliser, rate path and horizon: means over seeds."""
    rows: list[tuple[str, ...]] = []
    for delta, path, rounds in dict.fromkeys((p.delta, p.path, p.rounds) for p in points):
        group = [p for p in points if (p.delta, p.path, p.rounds) == (delta, path, rounds)]
        rows.append(
            (
                f"{delta:g}",
                path,
                str(rounds),
                f"{np.mean([p.variation for p in group]):.2f}",
                f"{np.mean([p.mean for p in group]):.4f}",
                f"{np.mean([p.late for p in group]):.5f}",
            )
        )
    return rows


def convergence_markdown(points: Sequence[Point]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in convergence_rows(points))]) + "\n"


def draw_convergence(points: Sequence[Point], path: Path) -> Path:
    """Squared gradient norm of the last quarter against T, one panel per delta, one line per rate path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    deltas = list(dict.fromkeys(p.delta for p in points))
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(deltas), figsize=(PAGE, 2.8), squeeze=False, layout="constrained")
        for ax, delta in zip(axes[0], deltas, strict=True):
            for i, name in enumerate(PATHS):
                horizons = sorted({p.rounds for p in points})
                for style, key in (("-", "late"), (":", "mean")):
                    values = [
                        np.mean([getattr(p, key) for p in points if (p.delta, p.path, p.rounds) == (delta, name, t)])
                        for t in horizons
                    ]
                    ax.loglog(horizons, values, style, marker="o", markersize=3, color=COLOURS[i],
                              label=name if key == "late" else None)  # fmt: skip
            ax.set_title(f"delta = {delta:g}")
            ax.set_xlabel("rounds T")
        axes[0][0].set_ylabel("squared gradient norm\n(solid: last quarter, dotted: all rounds)")
        axes[0][0].legend(title="rates")
        figure.savefig(path, bbox_inches="tight", dpi=150)
        plt.close(figure)
    return path
