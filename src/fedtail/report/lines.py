"""Line charts with bands: learning curves, rate trajectories, path variation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    esc,
    figure,
    html_table,
    legend,
    nice_range,
    number,
    run_mark,
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


@dataclass(frozen=True)
class Dot:
    """A point of interest on a line of the same colour."""

    x: float
    y: float
    colour: int
    name: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "round",
    y_label: str = "",
    floor: float | None = None,
    ceiling: float | None = None,
    full: bool = False,
    x_ticks: Mapping[float, str] | None = None,
    steps: bool = False,
    between: bool = False,
    mark: float | None = None,
    mark_label: str = "",
    dots: Sequence[Dot] = (),
    caption: str = "",
    x_name: Callable[[float], str] = "{:g}".format,
    runs: bool = False,
    run: int | None = None,
) -> str:
    """Lines over a common x; empty text if there is nothing to draw.

    ``full``: the axis goes from floor to ceiling; ``x_ticks``: where the other is labelled, by default at whole
    numbers; ``x_name``: an x as it is read; ``steps`` draws values that hold until the next x; ``between``: values
    between points may be read off the line; ``mark`` is an x with a dashed line; ``runs``: the lines are contenders,
    else ``run`` may be the contender that they are all of.
    """
    lines = [_thin(line) for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return ""
    lows = [v for li in lines for v in (li.y - li.spread if li.spread.size else li.y)]
    highs = [v for li in lines for v in (li.y + li.spread if li.spread.size else li.y)]
    ends_at = [v for v in (floor, ceiling) if v is not None] if full else []
    y_low, y_high = nice_range([*lows, *highs, *ends_at], floor, ceiling)
    ends = [float(v) for li in lines for v in (li.x.min(), li.x.max())] + list(x_ticks or ())
    x = Scale(min(ends), max(ends), LEFT, WIDTH - RIGHT)
    y = Scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    whole = {v: f"{v:g}" for v in ticks(x.low, x.high, 6) if v == int(v)} or {x.low: f"{x.low:g}"}
    out = [axes(x, y, x_ticks or whole, x_label, y_label)]
    if mark is not None:
        out.append(f'<line class="mark" x1="{x(mark)}" x2="{x(mark)}" y1="{y.start}" y2="{y.stop}"/>')
        late = mark > (x.low + x.high) / 2  # so that the words stay inside
        side = f'x="{x(mark) - 5}" text-anchor="end"' if late else f'x="{x(mark) + 5}"'
        out.append(f'<text class="tick halo" {side} y="{y.stop + 10}">{esc(mark_label)}</text>')
    for i, li in enumerate(lines):
        look = f"series s{colour(li.colour)}{' alt' if li.colour >= 8 else ''}"
        out.append(f'<g class="{look}" data-series="{i}"{run_mark(li.colour, runs)}>')
        if li.spread.size and float(np.nanmax(li.spread)) > 0:
            out.append(f'<path class="band" d="{_band(li, x, y)}"/>')
        out.append(f'<path class="line" d="{_path(li.x, li.y, x, y, steps)}"/>')
        if len(li.x) == 1:
            out.append(f'<circle class="dot" cx="{x(float(li.x[0]))}" cy="{y(float(li.y[0]))}" r="4"/>')
        for dot in dots:
            if dot.colour == li.colour:
                where = f'cx="{x(dot.x)}" cy="{y(min(max(dot.y, y.low), y.high))}"'
                out.append(f'<circle class="dot" {where} r="5.5"><title>{esc(dot.name)}</title></circle>')
        out.append("</g>")
    out.append(f'<line class="cursor" y1="{y.start}" y2="{y.stop}" x1="-9" x2="-9"/>')
    last = ", ".join(f"{li.name} {number(float(li.y[-1]))}" for li in lines[:8])
    return figure(
        title,
        "".join(out),
        summary=f"Line chart over {x_label}; last values: {last}. Arrow keys step through the values.",
        table=_table(lines, x_label, x_name),
        caption=caption,
        legend="" if runs and len(lines) == 1 else legend([(li.name, li.colour) for li in lines], runs),
        kind="lines",
        run=run,
        data={
            "x": [x.low, x.high, x.start, x.stop],
            "y": [y.low, y.high, y.start, y.stop],
            "label": x_label,
            "steps": steps,
            "between": between,
            "names": [x_name(v) for v in sorted({round(float(v), 5) for li in lines for v in li.x})],
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


def _table(lines: Sequence[Line], x_label: str, x_name: Callable[[float], str]) -> str:
    every = sorted({v for li in lines for v in li.x.tolist()})
    keep = every
    if len(every) > MOST_ROWS:
        keep = [every[i] for i in np.unique(np.linspace(0, len(every) - 1, MOST_ROWS).round().astype(int))]
    rows = []
    for v in keep:
        row = [x_name(v)]
        for li in lines:
            at = np.flatnonzero(li.x == v)
            if not at.size:
                row.append("–")
                continue
            i = int(at[0])
            has_spread = li.spread.size and li.spread[i] > 0
            row.append(number(float(li.y[i])) + (f" ± {number(float(li.spread[i]))}" if has_spread else ""))
        rows.append(row)
    title = f"{len(keep)} of {len(every)} points" if len(keep) < len(every) else ""
    return html_table([x_label, *(li.name for li in lines)], rows, caption=title)
