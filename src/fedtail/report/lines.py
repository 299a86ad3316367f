"""Line charts with bands: learning curves, rate trajectories, path variation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedtail.report.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    axes,
    colour,
    figure,
    html_table,
    legend,
    nice_range,
    number,
    ticks,
)

MOST_POINTS, MOST_ROWS = 300, 40


@dataclass(frozen=True)
class Line:
    """One series; ``spread`` draws a band of mean ± spread."""

    name: str
    colour: int
    x: np.ndarray
    y: np.ndarray
    spread: np.ndarray = field(default_factory=lambda: np.empty(0))


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "round",
    y_label: str = "",
    floor: float | None = None,
    ceiling: float | None = None,
    steps: bool = False,
    mark: float | None = None,
    mark_label: str = "",
    caption: str = "",
) -> str:
    """Lines over a common x; empty text if there is nothing to draw.

    ``steps`` draws values that hold until the next x; ``mark`` is an x with a dashed line.
    """
    lines = [_thin(line) for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return ""
    lows = [v for li in lines for v in (li.y - li.spread if li.spread.size else li.y)]
    highs = [v for li in lines for v in (li.y + li.spread if li.spread.size else li.y)]
    y_low, y_high = nice_range([*lows, *highs], floor, ceiling)
    x_low, x_high = min(float(li.x.min()) for li in lines), max(float(li.x.max()) for li in lines)
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    y = Scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    whole = [v for v in ticks(x_low, x_high, 6) if v == int(v)] or [x_low]
    out = [axes(x, y, whole, x_label, y_label)]
    if mark is not None:
        out.append(f'<line class="mark" x1="{x(mark)}" x2="{x(mark)}" y1="{y.start}" y2="{y.stop}"/>')
        out.append(f'<text class="tick" x="{x(mark) + 5}" y="{y.stop + 10}">{mark_label}</text>')
    for i, li in enumerate(lines):
        c = colour(li.colour)
        out.append(f'<g class="series s{c}{" alt" if li.colour >= 8 else ""}" data-series="{i}">')
        if li.spread.size and float(np.nanmax(li.spread)) > 0:
            out.append(f'<path class="band" d="{_band(li, x, y)}"/>')
        out.append(f'<path class="line" d="{_path(li.x, li.y, x, y, steps)}"/>')
        if len(li.x) == 1:
            out.append(f'<circle class="dot" cx="{x(float(li.x[0]))}" cy="{y(float(li.y[0]))}" r="4"/>')
        out.append("</g>")
    out.append(f'<line class="cursor" y1="{y.start}" y2="{y.stop}" x1="-9" x2="-9"/>')
    ends = ", ".join(f"{li.name} {number(float(li.y[-1]))}" for li in lines[:8])
    return figure(
        title,
        "".join(out),
        summary=f"Line chart over {x_label}; last values: {ends}. Arrow keys step through the values.",
        table=_table(lines, x_label),
        caption=caption,
        legend=legend([(li.name, colour(li.colour)) for li in lines]),
        kind="lines",
        data={
            "x": [x.low, x.high, x.start, x.stop],
            "y": [y.low, y.high, y.start, y.stop],
            "label": x_label,
            "steps": steps,
            "series": [_payload(li) for li in lines],
        },
    )


def _payload(line: Line) -> dict[str, object]:
    x, y, spread = line.x.tolist(), line.y.tolist(), line.spread.tolist()
    return {"name": line.name, "c": colour(line.colour), "x": x, "y": y, "s": spread}


def _thin(line: Line) -> Line:
    """At most MOST_POINTS evenly spaced points, first and last kept: no screen shows more."""
    if len(line.x) <= MOST_POINTS:
        return line
    keep = np.unique(np.linspace(0, len(line.x) - 1, MOST_POINTS).round().astype(int))
    spread = line.spread[keep] if line.spread.size else line.spread
    return replace(line, x=line.x[keep], y=line.y[keep], spread=spread)


def _path(xs: np.ndarray, ys: np.ndarray, x: Scale, y: Scale, steps: bool) -> str:
    parts, pen, previous = [], "M", 0.0
    for a, b in zip(xs.tolist(), ys.tolist(), strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        if steps and pen == "L":
            parts.append(f"L{x(a):g} {previous:g}")
        previous = y(b)
        parts.append(f"{pen}{x(a):g} {previous:g}")
        pen = "L"
    return "".join(parts)


def _band(line: Line, x: Scale, y: Scale) -> str:
    ok = np.isfinite(line.y) & np.isfinite(line.spread)
    xs = line.x[ok].tolist()
    up = [max(y.low, min(y.high, v)) for v in (line.y + line.spread)[ok].tolist()]
    down = [max(y.low, min(y.high, v)) for v in (line.y - line.spread)[ok].tolist()]
    points = [f"{x(a):g} {y(b):g}" for a, b in zip(xs, up, strict=True)]
    points += [f"{x(a):g} {y(b):g}" for a, b in zip(reversed(xs), reversed(down), strict=True)]
    return "M" + "L".join(points) + "Z"


def _table(lines: Sequence[Line], x_label: str) -> str:
    every = sorted({v for li in lines for v in li.x.tolist()})
    keep = every
    if len(every) > MOST_ROWS:
        keep = [every[i] for i in np.unique(np.linspace(0, len(every) - 1, MOST_ROWS).round().astype(int))]
    rows = []
    for v in keep:
        row = [f"{v:g}"]
        for li in lines:
            at = np.flatnonzero(li.x == v)
            if not at.size:
                row.append("–")
                continue
            i = int(at[0])
            has_spread = li.spread.size and li.spread[i] > 0
            row.append(number(float(li.y[i])) + (f" ± {number(float(li.spread[i]))}" if has_spread else ""))
        rows.append(row)
    title = f"{len(keep)} of {len(every)} rounds" if len(keep) < len(every) else ""
    return html_table([x_label, *(li.name for li in lines)], rows, caption=title)
