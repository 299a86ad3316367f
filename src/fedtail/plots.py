"""Charts as data: lines over an axis, rows of dots, maps of cells; and how matplotlib draws each of them.

The page of a report draws the same charts as interactive SVG (``report.svg``), so that a paper, a notebook and a
report show one picture for one thing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedtail.words import shortened

COLOURS = ("#77726f", "#1e74bd", "#b5230f", "#11623e", "#9081d3", "#bf7a37", "#4e9b9d", "#904376")
"""Colours of the page; the first, grey, is for what others are compared with."""
COLUMN, PAGE = 3.4, 7.0
"""Widths in inches of a column and of a page of common two-column papers."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e6ea",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "fedtail",
}
INK, MUTED = "#1f2430", "#67707d"
MOST_NAMES, MOST_NUMBERS = 40, 220
"""Rows or columns that have names in a figure, and cells that have numbers."""
SHARES = {v: f"{v:g}" for v in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
NOTHING = np.empty(0)


@dataclass(frozen=True)
class Line:
    """One series over an axis; ``spread`` draws a band of mean ± spread."""

    name: str
    colour: int
    x: np.ndarray
    y: np.ndarray
    spread: np.ndarray = field(default_factory=lambda: NOTHING)
    samples: np.ndarray = field(default_factory=lambda: NOTHING)
    """Samples behind each point, drawn as dots of that area with whiskers from ``low`` to ``high``."""
    low: np.ndarray = field(default_factory=lambda: NOTHING)
    high: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True)
class Dot:
    """A point of interest on a line of the same colour."""

    x: float
    y: float
    colour: int
    name: str


@dataclass(frozen=True)
class Chart:
    """The parts that every chart has."""

    title: str
    caption: str = field(default="", kw_only=True)
    runs: bool = field(default=False, kw_only=True)
    """Whether its series are contenders, which the page's filter hides by their colour."""
    run: int | None = field(default=None, kw_only=True)
    """Colour of the only contender that the chart is about."""


@dataclass(frozen=True)
class Lines(Chart):
    """Lines over a common x."""

    lines: Sequence[Line]
    y_label: str = ""
    x_label: str = "round"
    floor: float | None = None
    ceiling: float | None = None
    full: bool = False
    """The axis goes from floor to ceiling, whatever the values."""
    x_ticks: Mapping[float, str] | None = None
    x_name: Callable[[float], str] = "{:g}".format
    """An x as it is read."""
    steps: bool = False
    """Values hold until the next x."""
    between: bool = False
    """Values between points may be read off the line."""
    mark: float | None = None
    mark_label: str = ""
    """A dashed line at an x."""
    level: tuple[float, str] | None = None
    """A dotted line at a y, and what it is."""
    dots: Sequence[Dot] = ()
    diagonal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [line for line in self.lines if np.isfinite(line.y).any()])

    def __bool__(self) -> bool:
        return bool(self.lines)


@dataclass(frozen=True)
class Series:
    """A value per row of a chart of rows."""

    name: str
    colour: int
    values: np.ndarray
    spreads: np.ndarray = field(default_factory=lambda: NOTHING)
    each: Sequence[Mapping[str, float]] = ()
    """Single values behind the value of each row, such as those of seeds, by name."""

    def spread(self, row: int) -> float:
        return float(self.spreads[row]) if len(self.spreads) else float("nan")


@dataclass(frozen=True)
class Rows(Chart):
    """A named row per class, site or method, with a dot per series: no name is ever dropped."""

    names: Sequence[str]
    series: Sequence[Series]
    x_label: str = ""
    heading: str = ""
    """What a row is."""
    whole: bool = True
    """The axis goes from 0 to 1, else over the values."""
    link: bool = False
    """Dots of a row are joined."""
    sides: Sequence[str] = ()
    side_label: str = ""
    """A text at the end of each row, and what it is."""
    mark: float | None = None
    """An x with a dashed line."""
    owners: Sequence[int] = ()
    """Colour of the contender that each row is of."""

    def __bool__(self) -> bool:
        return bool(self.names) and any(np.isfinite(s.values).any() for s in self.series)


@dataclass(frozen=True)
class Heat(Chart):
    """(R, C) values as cells; ``shade`` in 0..1 sets the colour, by default values over their maximum."""

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    row_label: str = ""
    column_label: str = ""
    shade: np.ndarray | None = None
    unit: str = ""

    def __bool__(self) -> bool:
        return self.values.size > 0

    @property
    def shades(self) -> np.ndarray:
        return self.values / max(float(np.nanmax(self.values)), 1e-12) if self.shade is None else self.shade


def picture(width: float = COLUMN, height: float = 2.2) -> Any:
    """Return an empty figure that every notebook shows as PNG. Without pyplot, which would keep each figure and look
    for a display."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=110, facecolor="white", bbox_inches="tight")
            return out.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def draw(chart: Chart, width: float | None = None) -> Any:
    """Return the matplotlib figure of a chart, ``width`` inches wide."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return _DRAW[type(chart)](chart, width)


def shade(index: int) -> int:
    """Return the place among the colours of the i-th series; 0, grey, is only for what others are compared with."""
    return index if index < len(COLOURS) else 1 + (index - 1) % (len(COLOURS) - 1)


def colour(index: int) -> str:
    """Return the colour of the i-th series."""
    return COLOURS[shade(index)]


def line_on(
    ax: Any,
    line: Line,
    *,
    dashed: bool = False,
    steps: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    **look: Any,
) -> None:
    """Draw one line with its band or its dots on the axes of a figure."""
    c, style = colour(line.colour), "--" if dashed or line.colour >= len(COLOURS) else "-"
    more: dict[str, Any] = {"where": "post"} if steps else {}
    (ax.step if steps else ax.plot)(line.x, line.y, color=c, label=line.name, linestyle=style, **look, **more)
    if line.spread.size and float(np.nanmax(line.spread)) > 0:
        low, high = line.y - line.spread, line.y + line.spread
        if floor is not None or ceiling is not None:
            low, high = np.clip(low, floor, ceiling), np.clip(high, floor, ceiling)
        ax.fill_between(line.x, low, high, color=c, alpha=0.16, linewidth=0)
    if line.samples.size:
        ax.scatter(line.x, line.y, 4 + 160 * line.samples / max(line.samples.sum(), 1), color=c, linewidths=0)
        ax.vlines(line.x, line.low, line.high, color=c, linewidth=0.8)


def _lines(chart: Lines, width: float | None) -> Any:
    figure = picture(width or COLUMN, 3.0 if chart.diagonal else 2.4)
    ax = figure.add_subplot()
    if chart.diagonal:
        ax.plot([0, 1], [0, 1], color=COLOURS[0], linestyle=":", linewidth=0.9)
    for line in chart.lines:
        many: dict[str, Any] = {"alpha": 0.5, "linewidth": 0.8} if len(chart.lines) > len(COLOURS) else {}
        line_on(ax, line, steps=chart.steps, floor=chart.floor, ceiling=chart.ceiling, **many)
    for dot in chart.dots:
        ax.plot(dot.x, dot.y, "o", color=colour(dot.colour), markersize=4)
    if chart.mark is not None:
        ax.axvline(chart.mark, color=MUTED, linestyle="--", linewidth=0.9)
    if chart.level is not None:
        ax.axhline(chart.level[0], color=COLOURS[0], linestyle=":", linewidth=0.9, label=chart.level[1])
    if chart.full:
        ax.set_ylim(chart.floor, None if chart.ceiling is None else chart.ceiling + 0.02)
    elif chart.floor is not None:
        ax.set_ylim(bottom=max(chart.floor, ax.get_ylim()[0]))
    if chart.x_ticks is not None:
        ax.set_xticks(list(chart.x_ticks), list(chart.x_ticks.values()))
    elif chart.x_label == "round":
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel=chart.x_label, ylabel=chart.y_label)
    named = len(chart.lines) + (chart.level is not None)
    if 4 < named <= len(COLOURS):
        figure.legend(loc="outside upper center", ncols=4)
    elif 1 < named <= len(COLOURS):
        ax.legend()
    return figure


def _rows(chart: Rows, width: float | None) -> Any:
    n, apart = len(chart.names), len(chart.series)
    figure = picture(width or COLUMN, float(np.clip(0.9 + n * max(0.17, 0.09 * apart), 1.6, 8.0)))
    ax = figure.add_subplot()
    place = np.arange(n)
    for i, series in enumerate(chart.series):
        at = place + (0.0 if chart.link else (i - (apart - 1) / 2) * 0.6 / apart)
        spread = series.spreads if len(series.spreads) and n <= MOST_NAMES else None
        look = {"color": colour(series.colour), "label": series.name, "markersize": 3.5, "elinewidth": 0.9}
        ax.errorbar(series.values, at, xerr=spread, fmt="o", **look)
        for row, values in enumerate(series.each):
            ax.plot(list(values.values()), [at[row]] * len(values), "|", color=colour(series.colour), markersize=7)
    if chart.link and apart > 1:
        table = np.array([s.values for s in chart.series], dtype=float)
        known = np.isfinite(table).all(0)
        ends = table[:, known].min(0), table[:, known].max(0)
        ax.hlines(place[known], *ends, color=COLOURS[0], linewidth=0.8, zorder=0)
    if chart.mark is not None:
        ax.axvline(chart.mark, color=MUTED, linestyle="--", linewidth=0.9)
    if chart.whole:
        ax.set_xlim(-0.02, 1.02)
    sides = chart.sides or [""] * n
    names = [f"{shortened(a, 34)}{f'  ({b})' if b else ''}" for a, b in zip(chart.names, sides, strict=True)]
    ax.set_yticks(place if n <= MOST_NAMES else [], names if n <= MOST_NAMES else [])
    label = f"{chart.heading} ({chart.side_label})" if chart.side_label and n <= MOST_NAMES else chart.heading
    ax.set(xlabel=chart.x_label, ylabel=label, ylim=(n - 0.4, -0.6))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    if apart > 1 and not chart.owners:
        figure.legend(loc="outside upper center", ncols=min(apart, 4))
    return figure


def _heat(chart: Heat, width: float | None) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    k, c = chart.values.shape
    across, down = float(np.clip(0.42 * c, 2.0, 13)), float(np.clip(0.28 * k, 0.7, 11))
    figure = picture(width or across + 1.2, down + 1.1)
    main = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("cells", ["#e8eefb", "#7f9be0", "#24408e", "#131c47"])
    shown = np.ma.masked_where(~(np.nan_to_num(chart.values) > 0), chart.shades)
    image = main.imshow(shown, aspect="auto", cmap=colours, interpolation="nearest", vmin=0, vmax=1)
    if k * c <= MOST_NUMBERS:
        dark = image.to_rgba(shown)[..., :3] @ (0.299, 0.587, 0.114) < 0.55
        for (i, j), value in np.ndenumerate(chart.values):
            if value > 0:
                text = f"{value:,.0f}" if float(value).is_integer() else f"{value:.2f}".lstrip("0")
                main.text(j, i, text, ha="center", va="center", fontsize=6.5, color="white" if dark[i, j] else INK)
    turn = max(map(len, chart.columns)) > 3
    if c <= MOST_NAMES:
        main.set_xticks(
            range(c),
            [shortened(name, 24) for name in chart.columns],
            rotation=40 if turn else 0,
            ha="right" if turn else "center",
        )
    if k <= MOST_NAMES:
        main.set_yticks(range(k), [shortened(name, 24) for name in chart.rows])
    main.set(xlabel=chart.column_label, ylabel=chart.row_label if k <= MOST_NAMES else f"{k:,} rows: {chart.row_label}")
    main.grid(visible=False)
    main.tick_params(which="both", length=0)
    for spine in main.spines.values():
        spine.set_visible(False)
    if k * c > MOST_NUMBERS:
        figure.colorbar(image, ax=main, shrink=0.5, pad=0.01, label=chart.unit)
    return figure


_DRAW: dict[type[Chart], Callable[[Any, float | None], Any]] = {Lines: _lines, Rows: _rows, Heat: _heat}


def thinned(line: Line, most: int = 300) -> Line:
    """Return the line at evenly spaced points, first and last kept: no screen shows more."""
    if len(line.x) <= most:
        return line
    keep = np.unique(np.linspace(0, len(line.x) - 1, most).round().astype(int))
    return replace(line, x=line.x[keep], y=line.y[keep], spread=line.spread[keep] if line.spread.size else line.spread)
