"""Grouped bars and dot plots: class groups, one dot per seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    name_room,
    nice_range,
    number,
    run_mark,
    ticks,
    wrapped_name,
)

WIDEST = 64
"""Of a bar."""
Series = tuple[str, int, np.ndarray, np.ndarray]
"""Name, colour, (n,) means and (n,) spreads (NaN for none)."""


def bar_chart(title: str, names: Sequence[str], series: Sequence[Series], *, y_label: str, caption: str = "") -> str:
    """A cluster of bars per name, one bar per contender, with ± whiskers; values from 0 to 1."""
    width = max(WIDTH, 60 + 14 * len(names) * (len(series) + 1))
    width = min(width, 2 * WIDTH)
    height = HEIGHT - 22  # no axis title below
    y = Scale(0.0, 1.0, height - 26, TOP)
    x = Scale(0.0, len(names), LEFT, width - RIGHT)
    slot = (x.stop - x.start) / len(names)
    bar = min(slot * 0.78 / len(series), WIDEST)
    before = (slot - bar * len(series)) / 2
    out = [axes(x, y, {}, "", y_label)]
    for j, name in enumerate(names):
        middle = x(j + 0.5)
        out.append(f'<text class="tick" x="{middle}" y="{y.start + 17}" text-anchor="middle">{esc(name)}</text>')
    for i, (label, c, means, spreads) in enumerate(series):
        out.append(f'<g class="series s{colour(c)}" data-series="{i}"{run_mark(c)}>')
        for j, (v, s) in enumerate(zip(means, spreads, strict=True)):
            if not math.isfinite(v):
                continue
            left = x(j) + before + i * bar
            tip = f"{names[j]}\n{label}: {number(v)}" + (f" ± {number(s)}" if math.isfinite(s) else "")
            top = y(min(v, 1.0))
            out.append(
                f'<rect class="col" data-tip="{esc(tip)}" x="{left:.1f}" y="{top}" width="{max(bar - 1.5, 1):.1f}" '
                f'height="{y.start - top:.1f}" rx="1.5"/>'
            )
            if math.isfinite(s) and s > 0:
                mid = left + max(bar - 1.5, 1) / 2
                ends = f'y1="{y(min(v + s, 1))}" y2="{y(max(v - s, 0))}"'
                out.append(f'<line class="whisker" x1="{mid:.1f}" x2="{mid:.1f}" {ends}/>')
        out.append("</g>")
    rows = [
        [n, *(mean_and_spread(means[j], spreads[j]) for _, _, means, spreads in series)] for j, n in enumerate(names)
    ]
    return figure(
        title,
        "".join(out),
        summary=f"Bar chart of {y_label} for {', '.join(names[:12])}. Arrow keys step through the bars.",
        table=html_table(["", *(s[0] for s in series)], rows),
        caption=caption,
        legend="" if len(series) == 1 else legend([(s[0], s[1]) for s in series], runs=True),
        size=(width, height),
        kind="marks",
        wide=width > WIDTH,
    )


def dot_plot(
    title: str,
    rows: Sequence[tuple[str, int, dict[str, float]]],
    *,
    x_label: str,
    caption: str = "",
    runs: bool = False,
) -> str:
    """A row per contender, a dot per seed, a bar at the mean; rows are (label, colour, {seed label: value})."""
    rows = [r for r in rows if r[2]]
    if not rows:
        return ""
    left = name_room(r[0] for r in rows)
    height = 30 + 34 * len(rows) + BOTTOM
    low, high = nice_range([v for r in rows for v in r[2].values()], 0.0, 1.0)
    x = Scale(low, high, left, WIDTH - RIGHT - 48)
    y = Scale(0, len(rows), height - BOTTOM, TOP)
    out = []
    for v in ticks(low, high):
        out.append(f'<line class="grid" x1="{x(v)}" x2="{x(v)}" y1="{y.start}" y2="{y.stop}"/>')
        out.append(f'<text class="tick" x="{x(v)}" y="{y.start + 17}" text-anchor="middle">{v:g}</text>')
    middle = (x.start + x.stop) / 2
    out.append(f'<text class="label" x="{middle}" y="{y.start + 38}" text-anchor="middle">{esc(x_label)}</text>')
    for i, (label, c, values) in enumerate(rows):
        at = y(len(rows) - i - 0.5)
        mean = float(np.mean(list(values.values())))
        out.append(f'<g class="series s{colour(c)}" data-series="{i}"{run_mark(c, runs)}>')
        out.append(wrapped_name(label, left - 10, at))
        out.append(
            f'<line class="range" x1="{x(min(values.values()))}" x2="{x(max(values.values()))}" y1="{at}" y2="{at}"/>'
        )
        for seed, v in values.items():
            tip = esc(f"{label}\n{seed}: {number(v)}")
            out.append(f'<circle class="dot soft" data-tip="{tip}" cx="{x(v)}" cy="{at}" r="5"/>')
        out.append(f'<line class="mean" x1="{x(mean)}" x2="{x(mean)}" y1="{at - 10}" y2="{at + 10}"/>')
        out.append(f'<text class="value" x="{WIDTH - 6}" y="{at}" dy=".33em" text-anchor="end">{number(mean)}</text>')
        out.append("</g>")
    seeds = list(dict.fromkeys(s for r in rows for s in r[2]))
    table = html_table(
        ["", *seeds, "mean"],
        [
            [r[0], *(number(r[2].get(s, math.nan)) for s in seeds), number(float(np.mean(list(r[2].values()))))]
            for r in rows
        ],
    )
    means = ", ".join(f"{r[0]} {number(float(np.mean(list(r[2].values()))))}" for r in rows)
    return figure(
        title,
        "".join(out),
        summary=f"One dot per seed; means: {means}.",
        table=table,
        caption=caption,
        size=(WIDTH, height),
        kind="marks",
    )


def mean_and_spread(mean: float, spread: float) -> str:
    """``0.857 ± 0.012``; without spread where there is none."""
    return number(mean) + (f" ± {number(spread)}" if math.isfinite(mean) and math.isfinite(spread) else "")
