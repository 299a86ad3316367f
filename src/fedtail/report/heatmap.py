"""Heat maps: the client-by-class label map and confusion matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fedtail.report.chart import Scale, cut, esc, figure, html_table, number

LEVELS = 10
MOST_LETTERS = 16
"""Longer column names are cut."""


def heatmap(
    title: str,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    row_label: str,
    column_label: str,
    shade: np.ndarray | None = None,
    unit: str = "",
    caption: str = "",
    wide: bool = False,
) -> str:
    """(R, C) values as cells; ``shade`` in 0..1 sets the colour, by default values over their maximum.

    Cells of one colour are one path, so that 100 x 100 cells stay a small page.
    """
    n_rows, n_columns = values.shape
    if shade is None:
        shade = values / max(float(np.nanmax(values)), 1e-12)
    longest = max(len(r) for r in rows)
    left = min(40 + 7 * longest, 180)
    width = 960 if wide else 480
    cell = min((width - left - 12) / n_columns, 84 if wide else 46 if n_columns > 6 else 70)
    tall = min(cell, 30) if n_rows > 1 else 30
    long = min(max(len(c) for c in columns), MOST_LETTERS)
    turned = 7.5 * long > cell  # so that every class has its name
    deep = 20 + 6 * long if turned else 22
    height = 8 + tall * n_rows + deep + 24
    x = Scale(0, n_columns, left, left + cell * n_columns)
    y = Scale(0, n_rows, 8, 8 + tall * n_rows)
    levels = np.where(values > 0, np.clip(np.ceil(shade * LEVELS), 1, LEVELS), 0).astype(int)
    out = [*_cells(levels, x, y, cell, tall)]
    if cell >= 24 and tall >= 16 and values.size <= 400:
        out += _numbers(values, levels, x, y)
    out += _names(rows, columns, x, y, cell, tall, turned)
    middle = (x.start + x.stop) / 2
    out.append(f'<text class="label" x="{middle}" y="{height - 6}" text-anchor="middle">{esc(column_label)}</text>')
    out.append(
        f'<text class="label" text-anchor="middle" transform="translate(16 {(y.start + y.stop) / 2}) rotate(-90)">'
        f"{esc(row_label)}</text>"
    )
    out.append('<rect class="pick" width="0" height="0"/>')
    table = html_table(
        [f"{row_label} / {column_label}", *columns], [[rows[r], *map(_text, values[r])] for r in range(n_rows)]
    )
    return figure(
        title,
        "".join(out),
        summary=f"Heat map, {n_rows} by {n_columns} cells. Arrow keys move from cell to cell.",
        table=table,
        caption=caption,
        size=(max(x.stop + 12, width), height),
        kind="heat",
        wide=wide,
        data={
            "grid": [x.start, y.start, cell, tall],
            "rows": list(rows),
            "columns": list(columns),
            "values": [[float(v) for v in row] for row in values],
            "labels": [row_label, column_label],
            "unit": unit,
        },
    )


def _cells(levels: np.ndarray, x: Scale, y: Scale, cell: float, tall: float) -> Iterator[str]:
    gap = 1 if cell > 8 else 0
    box = f"h{cell - gap:.2f}v{tall - gap:.2f}h-{cell - gap:.2f}z"
    for level in range(LEVELS + 1):
        path = "".join(f"M{x(float(c)):g} {y(float(r)):g}{box}" for r, c in np.argwhere(levels == level))
        if path:
            yield f'<path class="h{level}" d="{path}"/>'


def _numbers(values: np.ndarray, levels: np.ndarray, x: Scale, y: Scale) -> Iterator[str]:
    for (r, c), value in np.ndenumerate(values):
        if value > 0:
            ink = "on-dark" if levels[r, c] > LEVELS * 0.55 else "on-light"
            text = f"{value:g}" if float(value).is_integer() else f"{value:.2f}".lstrip("0")
            place = f'x="{x(c + 0.5)}" y="{y(r + 0.5)}" dy=".34em" text-anchor="middle"'
            yield f'<text class="cell {ink}" {place}>{text}</text>'


def _names(
    rows: Sequence[str], columns: Sequence[str], x: Scale, y: Scale, cell: float, tall: float, turned: bool
) -> Iterator[str]:
    """Beside the rows and below the columns, as many as there is room for."""
    for r in range(0, len(rows), max(1, math.ceil(15 / tall))):
        place = f'x="{x.start - 7}" y="{y(r + 0.5)}" dy=".33em" text-anchor="end"'
        yield f'<text class="tick" {place}>{esc(cut(rows[r], 22))}</text>'
    for c in range(0, len(columns), max(1, math.ceil(17 / cell)) if turned else 1):
        at = x(c + 0.5)
        if turned:
            place = f'transform="translate({at + 3} {y.stop + 8}) rotate(-60)" text-anchor="end"'
        else:
            place = f'x="{at}" y="{y.stop + 16}" text-anchor="middle"'
        yield f'<text class="tick" {place}>{esc(cut(columns[c], MOST_LETTERS))}</text>'


def _text(value: float) -> str:
    return number(float(value), 2)
