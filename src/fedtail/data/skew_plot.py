"""The label-skew plot of a federation: sites by classes, with class totals above and site sizes beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data.inspection import Inspection, ratio
from fedtail.errors import FedtailError, writing

INK, MUTED, RULE, BAR = "#1f2430", "#6b7280", "#d9dce3", "#4f6bb0"
FORMATS = (".png", ".svg", ".pdf")
LABELLED = 40
"""Rows and columns get names up to this many."""
NUMBERED = 220
"""Cells get numbers up to this many."""
DOTTED = 120
"""Cells of the rarest group get a dot up to this many rows and columns."""


def save_skew_plot(found: Inspection, path: str | Path) -> Path:
    """Draw ``found`` to a PNG, SVG or PDF file."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise FedtailError(f"--plot {str(path)!r} must end in {', '.join(FORMATS)}")
    figure = skew_figure(found)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150, bbox_inches="tight", facecolor="white")
    return target


def skew_figure(found: Inspection) -> Any:
    """A matplotlib figure: counts on a logarithmic colour scale, white where a site lacks the class, a dot where the
    class is in the site's last (rarest) group at the inspected rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    k, c = found.table.shape
    width, height = float(np.clip(0.46 * c, 4.2, 13)), float(np.clip(0.34 * k, 1.5, 11))
    figure = Figure(figsize=(width + 3.2, height + 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(width, 1.5), height_ratios=(1.15, height), wspace=0.02, hspace=0.02)
    main = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=main)
    beside = figure.add_subplot(grid[1, 1], sharey=main)

    dotted = k * c > NUMBERED and max(k, c) <= DOTTED
    shown = np.ma.masked_equal(found.table, 0)
    colours = LinearSegmentedColormap.from_list("counts", ["#e8eefb", "#7f9be0", "#24408e", "#131c47"])
    image = main.imshow(
        shown, aspect="auto", cmap=colours, norm=LogNorm(1, max(found.table.max(), 2)), interpolation="nearest"
    )
    if k * c <= NUMBERED:
        _numbers(main, found, image.to_rgba(shown)[..., :3] @ (0.299, 0.587, 0.114) < 0.55)
    elif dotted:
        rows, cols = np.nonzero(_last_group(found))
        main.scatter(cols, rows, s=min(9, 900 / max(k, c)), color="#f2b134", linewidths=0)
    _names(main.xaxis, found.classes, rotation=0 if max(map(len, found.classes)) <= 3 else 40)
    _names(main.yaxis, found.sites)
    main.set_xlabel("class", color=MUTED)
    main.set_ylabel("site" if k <= LABELLED else f"{k:,} sites", color=MUTED)
    if k <= LABELLED and c <= LABELLED:
        main.set_xticks(np.arange(c + 1) - 0.5, minor=True)
        main.set_yticks(np.arange(k + 1) - 0.5, minor=True)
        main.grid(which="minor", color="white", linewidth=1.5)
    main.tick_params(which="both", length=0, colors=INK)

    above.bar(np.arange(c), found.total, color=BAR, width=0.82)
    above.set_yscale("log")
    above.set_ylim(bottom=0.7)
    above.yaxis.set_minor_formatter(NullFormatter())
    above.set_ylabel("all sites", color=MUTED)
    sizes = found.table.sum(1)
    if k <= DOTTED:
        beside.barh(np.arange(k), sizes, color=BAR, height=0.82)
    else:
        beside.fill_betweenx(np.arange(k), 0, sizes, color=BAR, step="mid", linewidth=0)
    beside.set_xlabel("samples", color=MUTED)
    for axes in (above, beside):
        axes.tick_params(which="both", length=0, colors=MUTED, labelsize=8)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
    above.grid(axis="y", color=RULE, linewidth=0.6)
    above.set_axisbelow(True)
    above.tick_params(labelbottom=False)
    beside.tick_params(labelleft=False)
    beside.locator_params(axis="x", nbins=3)
    for spine in main.spines.values():
        spine.set_visible(False)
    lacking = int(((found.table == 0) & (found.total > 0)).any(1).sum())
    figure.suptitle(
        f"{found.name}: {found.total.sum():,} training samples, {c} classes, {k:,} sites",
        color=INK, fontsize=12, fontweight="bold", x=0.01, ha="left",
    )  # fmt: skip
    mark = "orange" if k * c <= NUMBERED else "orange dot" if dotted else ""
    marked = f"; {mark}: rarest group at rate {found.rate:g}" if mark and found.n_groups > 1 else ""
    above.set_title(
        f"imbalance {ratio(found.total):.4g}, label skew {found.skew:.2f}; {lacking:,} of {k:,} sites lack a class "
        f"(blank){marked}",
        color=MUTED, fontsize=8.5, loc="left",
    )  # fmt: skip
    if k * c > NUMBERED:
        bar = figure.colorbar(image, ax=[above, beside, main], shrink=0.5, pad=0.01, aspect=18)
        bar.outline.set_visible(False)
        bar.ax.tick_params(which="both", length=0, colors=MUTED, labelsize=8)
        bar.set_label("samples per site and class", color=MUTED, fontsize=8)
    return figure


def _last_group(found: Inspection) -> np.ndarray:
    """(K, C) whether a class is in the site's last group."""
    return np.asarray(found.groups == found.n_groups - 1) & (found.n_groups > 1)


def _numbers(axes: Any, found: Inspection, dark: np.ndarray) -> None:
    last = _last_group(found)
    size = 8 if found.table.max() < 10_000 else 7
    for (i, j), n in np.ndenumerate(found.table):
        if n == 0:
            continue
        colour = ("#ffc65c" if dark[i, j] else "#b45309") if last[i, j] else ("white" if dark[i, j] else INK)
        axes.text(j, i, f"{n:,}", ha="center", va="center", fontsize=size, color=colour,
                  fontweight="bold" if last[i, j] else "normal")  # fmt: skip


def _names(axis: Any, names: tuple[str, ...], rotation: int = 0) -> None:
    if len(names) > LABELLED:
        return
    short = [n if len(n) <= 18 else f"{n[:17]}…" for n in names]
    axis.set_ticks(range(len(names)), short, rotation=rotation, fontsize=8.5)
    if rotation:
        for label in axis.get_ticklabels():
            label.set(ha="right", rotation_mode="anchor")
