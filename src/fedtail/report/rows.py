"""Charts with a named row per class or site, so that no name is dropped: long ones wrap, many make the chart tall."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.report.bars import Series, mean_and_spread
from fedtail.report.chart import (
    WIDTH,
    Scale,
    colour,
    esc,
    figure,
    html_table,
    legend,
    name_room,
    nice_range,
    run_mark,
    ticks,
    wrap_name,
    wrapped_name,
)

FEW = 16
"""Rows up to which they stand wide apart."""


def row_chart(
    title: str,
    names: Sequence[str],
    series: Sequence[Series],
    *,
    x_label: str,
    heading: str,
    floor: float | None = 0.0,
    ceiling: float | None = 1.0,
    whole: bool = True,
    link: bool = False,
    sides: Sequence[str] = (),
    side_label: str = "",
    behind: Sequence[float] = (),
    mark: float | None = None,
    caption: str = "",
    runs: bool = False,
    run: int | None = None,
) -> str:
    """A dot per series in each row; ``heading`` says what a row is.

    ``whole``: the axis goes from floor to ceiling, else over the values; ``link`` joins the dots of a row; ``sides``: a
    text at the end of each row; ``behind``: pale bars from 0 to 1; ``mark``: an x with a dashed line.
    """
    if not names or not any(np.isfinite(s[2]).any() for s in series):
        return ""
    lines = max(len(wrap_name(name)) for name in names)
    tall = (24 if len(names) <= FEW else 19) + 13 * (lines - 1)
    tall = tall if link else max(tall, 6 + 8 * len(series))
    left = name_room(names)
    right = WIDTH - 16 - (8.2 * max(map(len, (*sides, side_label))) if sides else 0)
    values = [v for s in series for v in s[2]]
    low, high = (floor or 0.0, ceiling or 1.0) if whole else nice_range(values, floor, ceiling)
    top = 26.0 if sides or len(names) > FEW else 8.0
    x, y = Scale(low, high, left, right), Scale(0, len(names), top, top + tall * len(names))
    height = y.stop + 44
    out = _axis(x, y, x_label, twice=len(names) > FEW)
    if sides:
        out.append(f'<text class="tick" x="{WIDTH - 6}" y="{top - 10}" text-anchor="end">{esc(side_label)}</text>')
    if mark is not None and low <= mark <= high:
        out.append(f'<line class="mark" x1="{x(mark)}" x2="{x(mark)}" y1="{y.start}" y2="{y.stop}"/>')
    for j in range(len(names)):
        at = y(j + 0.5)
        if len(behind):
            wide = max(0.0, behind[j]) * (x.stop - x.start)
            out.append(f'<rect class="ghost" x="{x.start}" y="{y(j) + 2:g}" width="{wide:.1f}" height="{tall - 4:g}"/>')
        out.append(wrapped_name(names[j], left - 8, at))
        if sides:
            out.append(f'<text class="tick" x="{WIDTH - 6}" y="{at}" dy=".33em" text-anchor="end">{sides[j]}</text>')
        seen = [x(float(s[2][j])) for s in series if math.isfinite(s[2][j])]
        if link and len(seen) > 1:
            out.append(f'<line class="link" x1="{min(seen)}" x2="{max(seen)}" y1="{at}" y2="{at}"/>')
    shift = 0.0 if link else min(8.0, tall * 0.7 / max(len(series), 1))
    for i, one in enumerate(series):
        out.append(f'<g class="series s{colour(one[1])}" data-series="{i}"{run_mark(one[1], runs)}>')
        out += [
            _dot(names[j], one, j, x, y(j + 0.5) + (i - (len(series) - 1) / 2) * shift)
            for j in range(len(names))
            if math.isfinite(one[2][j])
        ]
        out.append("</g>")
    more = [side_label] if sides else []
    table = html_table(
        [heading, *more, *(s[0] for s in series)],
        [
            [names[j], *([sides[j]] if sides else []), *(mean_and_spread(s[2][j], s[3][j]) for s in series)]
            for j in range(len(names))
        ],
    )
    return figure(
        title,
        "".join(out),
        summary=f"{x_label} of {len(names)} rows. Arrow keys step through the values.",
        table=table,
        caption=caption,
        legend="" if runs and len(series) == 1 else legend([(s[0], s[1]) for s in series], runs),
        size=(WIDTH, height),
        kind="marks",
        run=run,
    )


def _axis(x: Scale, y: Scale, label: str, twice: bool) -> list[str]:
    out = []
    for v in ticks(x.low, x.high):
        out.append(f'<line class="grid" x1="{x(v)}" x2="{x(v)}" y1="{y.start}" y2="{y.stop}"/>')
        for at in (y.start - 10, y.stop + 17) if twice else (y.stop + 17,):
            out.append(f'<text class="tick" x="{x(v)}" y="{at}" text-anchor="middle">{v:g}</text>')
    middle = (x.start + x.stop) / 2
    out.append(f'<text class="label" x="{middle}" y="{y.stop + 37}" text-anchor="middle">{esc(label)}</text>')
    return out


def _dot(name: str, series: Series, j: int, x: Scale, at: float) -> str:
    label, _, means, spreads = series
    v, s = float(means[j]), float(spreads[j])
    tip = esc(f"{name}\n{label}: {mean_and_spread(v, s)}")
    out = ""
    if math.isfinite(s) and s > 0:
        ends = f'x1="{x(max(v - s, x.low))}" x2="{x(min(v + s, x.high))}"'
        out = f'<line class="whisker strong" {ends} y1="{at:.1f}" y2="{at:.1f}"/>'
    return out + f'<circle class="dot" data-tip="{tip}" cx="{x(v)}" cy="{at:.1f}" r="4.5"/>'
