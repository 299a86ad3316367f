"""Charts as the page draws them: scales, paths and places, for the template of SVG with its accessible frame."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from fedtail.plots import Line, Lines, Rows, shade, thinned
from fedtail.report.blocks import environment
from fedtail.words import mean_spread, number

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 46
LETTERS = 24
"""Letters of a name on one line."""
FEW = 16
"""Rows up to which they stand wide apart."""


@dataclass(frozen=True)
class Scale:
    """A linear map from data to canvas units."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self.start + share * (self.stop - self.start), 2)

    @property
    def middle(self) -> float:
        return round((self.start + self.stop) / 2, 2)

    def within(self, value: float) -> float:
        """Return the nearest value that the axis has."""
        return min(max(value, self.low), self.high)


def ticks(low: float, high: float) -> list[float]:
    """Return about six round numbers around [low, high].

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    values = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [round(float(v), 12) + 0.0 for v in values]


def nice_range(values: Sequence[float], floor: float | None, ceiling: float | None) -> tuple[float, float]:
    """Return a range that holds all finite values, ends on ticks and stays within floor and ceiling."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    pad = (abs(high) * 0.1 or 0.5) if high - low < 1e-9 else 0.0
    around = ticks(low - pad, high + pad)
    low, high = around[0], around[-1]
    return low if floor is None else max(low, floor), high if ceiling is None else min(high, ceiling)


def svg(chart: Lines | Rows) -> Markup:
    """Return a chart as a figure of the page, with legend, caption and the numbers behind it."""
    values = {"c": chart, **(_lines(chart) if isinstance(chart, Lines) else _rows(chart))}
    return Markup(environment().get_template("charts.html").render(**values))


def _lines(chart: Lines) -> dict[str, Any]:
    lines = [thinned(line) for line in chart.lines]
    height = HEIGHT + 50 if chart.diagonal else HEIGHT
    bounds = [v for li in lines for s in (-1, 1) for v in (li.y + s * li.spread if li.spread.size else li.y)]
    ends_at = [v for v in (chart.floor, chart.ceiling) if v is not None] if chart.full else []
    y = Scale(*nice_range([*bounds, *ends_at], chart.floor, chart.ceiling), height - BOTTOM, TOP)
    ends = [float(v) for li in lines for v in (li.x.min(), li.x.max())] + list(chart.x_ticks or ())
    x = Scale(min(ends), max(ends), LEFT, WIDTH - RIGHT)
    whole = {v: f"{v:g}" for v in ticks(x.low, x.high) if v == int(v) and x.low <= v <= x.high}
    return {
        "kind": "lines",
        "x": x,
        "y": y,
        "x_ticks": chart.x_ticks or whole or {x.low: f"{x.low:g}"},
        "series": [(line, _path(line, x, y, chart.steps), _band(line, x, y)) for line in lines],
        "size": (WIDTH, height),
        "legend": lines if len(lines) > 1 or not (chart.runs or chart.diagonal) else [],
        "data": {
            "x": astuple(x),
            "y": astuple(y),
            "label": chart.x_label,
            "steps": chart.steps,
            "between": chart.between,
            "names": [chart.x_name(v) for v in sorted({round(float(v), 5) for li in lines for v in li.x})],
            "series": [
                {"name": li.name, "c": shade(li.colour)}
                | {key: values.tolist() for key, values in (("x", li.x), ("y", li.y), ("s", li.spread))}
                for li in lines
            ],
        },
    }


def _path(line: Line, x: Scale, y: Scale, steps: bool) -> str:
    at, height = (np.repeat(line.x, 2)[1:], np.repeat(line.y, 2)[:-1]) if steps else (line.x, line.y)
    parts, pen = [], "M"
    for a, b in zip(at.tolist(), height.tolist(), strict=True):
        known = math.isfinite(b)
        parts += [f"{pen}{x(a):g} {y(b):g}"] if known else []
        pen = "L" if known else "M"
    return "".join(parts)


def _band(line: Line, x: Scale, y: Scale) -> str:
    if not line.spread.size or not float(np.nanmax(line.spread)) > 0:
        return ""
    ok = np.isfinite(line.y) & np.isfinite(line.spread)
    at, mean, spread = line.x[ok], line.y[ok], line.spread[ok]
    around = zip(
        np.append(at, at[::-1]).tolist(), np.append(mean + spread, (mean - spread)[::-1]).tolist(), strict=True
    )
    return "M" + "L".join(f"{x(a):g} {y(y.within(b)):g}" for a, b in around) + "Z"


def _rows(chart: Rows) -> dict[str, Any]:
    n, apart = len(chart.names), len(chart.series)
    parts = [wrapped(name) for name in chart.names]
    tall = (24 if n <= FEW else 19) + 13 * (max(map(len, parts)) - 1)
    tall = 34 if chart.owners else max(tall, 6 + (5 if chart.link else 8) * apart)
    left = 24 + max(_letters(part) for name in parts for part in name)
    right = WIDTH - 16 - (8.2 * max(map(len, (*chart.sides, chart.side_label))) if chart.sides else 0)
    values = [v for s in chart.series for v in s.values]
    values += [v for s in chart.series for each in s.each for v in each.values()]
    most = None if any(v > 1 for v in values) else 1.0
    low, high = (0.0, 1.0) if chart.whole else nice_range(values, 0.0, most)
    top = 26.0 if (chart.sides and chart.side_label) or n > FEW else 8.0
    x, y = Scale(low, high, left, right), Scale(0, n, top, top + tall * n)
    shift = 0.0 if chart.owners else min(8.0, tall * 0.7 / max(apart, 1))
    return {
        "kind": "marks",
        "x": x,
        "y": y,
        "tall": tall,
        "names": parts,
        "shifts": [(i - (apart - 1) / 2) * shift for i in range(apart)],
        "twice": n > FEW,
        "size": (WIDTH, y.stop + 44),
        "legend": [] if chart.owners or (chart.runs and apart == 1) else chart.series,
    }


def value_text(mean: float, spread: float = math.nan) -> str:
    """Return a value as the charts write it; whole numbers stay whole."""
    return mean_spread(mean, spread) if math.isfinite(spread) else number(mean)


def wrapped(name: str) -> list[str]:
    """Return a name in at most two lines; the end of a very long one is cut, and stands in the data table."""
    return textwrap.wrap(name, LETTERS, max_lines=2, placeholder="…") or [""]


def _letters(text: str) -> float:
    """Return the canvas units that a name takes, in the larger letters of a phone."""
    return sum(11.2 if c.isupper() or c in "mw%+" else 5.0 if c in "ijlft.,:;' " else 8.7 for c in text)


def rounded(data: Any) -> Any:
    """Return numbers as the page's script reads them: no more digits than it shows, null where there is none."""
    if isinstance(data, float):
        return None if not math.isfinite(data) else int(data) if data.is_integer() else round(data, 5)
    if isinstance(data, dict):
        return {k: rounded(v) for k, v in data.items()}
    return [rounded(v) for v in data] if isinstance(data, Iterable) and not isinstance(data, str) else data
