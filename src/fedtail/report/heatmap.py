"""Heat maps: the client-by-class label map and confusion matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedtail.report.chart import Cell, Scale, cut, esc, figure, html_table, number

LEVELS = 10
MOST_LETTERS = 30
"""Longer names are cut; the tooltip and the data table have them whole."""
THIN = 5
"""Samples below which a share says next to nothing."""
MOST_CELLS = 400
"""In a data table that is written out."""
LEAST = 15
"""Least size of a cell with a name of its own: no name is dropped, a map of many scrolls."""


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
    numbers: bool = True,
    every: int = 1,
    sides: Sequence[str] = (),
    run: int | None = None,
) -> str:
    """(R, C) values as cells; ``shade`` in 0..1 sets the colour, by default values over their maximum.

    Cells of one colour are one path, so that 100 x 100 cells stay a small page. ``every``: of columns that are
    numbers in order, such as rounds, only so many are named. ``sides``: a text at the end of each row.
    """
    n_rows, n_columns = values.shape
    if shade is None:
        shade = values / max(float(np.nanmax(values)), 1e-12)
    left = 40 + 7 * min(max(len(r) for r in rows), MOST_LETTERS)
    right = 12 + (8 * max(map(len, sides)) if sides else 0)
    width = 960 if wide else 480
    cell = min((width - left - right) / n_columns, 84 if wide else 46 if n_columns > 6 else 70)
    cell = max(cell, LEAST) if every == 1 else cell
    tall = min(max(cell, LEAST), 30) if n_rows > 1 else 30
    tall = min(tall, 18) if n_rows > 24 else tall
    long = min(max(len(c) for c in columns), MOST_LETTERS)
    turned = 7.5 * long > cell * every  # so that every class has its name
    deep = 20 + 6.3 * long if turned else 22
    height = 8 + tall * n_rows + deep + 24
    x = Scale(0, n_columns, left, left + cell * n_columns)
    y = Scale(0, n_rows, 8, 8 + tall * n_rows)
    levels = np.where(np.nan_to_num(values) > 0, np.clip(np.ceil(np.nan_to_num(shade) * LEVELS), 1, LEVELS), 0).astype(
        int
    )
    out = [*_cells(levels, x, y, cell, tall)]
    if numbers and cell >= 24 and tall >= 16 and values.size <= 600:
        out += _numbers(values, levels, x, y)
    out += _names(rows, columns, x, y, turned, every)
    for r, text in enumerate(sides):
        out.append(f'<text class="tick" x="{x.stop + 8:g}" y="{y(r + 0.5)}" dy=".33em">{esc(text)}</text>')
    middle = (x.start + x.stop) / 2
    out.append(f'<text class="label" x="{middle}" y="{height - 6}" text-anchor="middle">{esc(column_label)}</text>')
    out.append(
        f'<text class="label" text-anchor="middle" transform="translate(16 {(y.start + y.stop) / 2}) rotate(-90)">'
        f"{esc(row_label)}</text>"
    )
    out.append('<rect class="pick" width="0" height="0"/>')
    table = ""  # of many cells the page's script makes it when it is opened
    if values.size <= MOST_CELLS:
        cells = [[rows[r], *map(_text, values[r])] for r in range(n_rows)]
        table = html_table([f"{row_label} / {column_label}", *columns], cells)
    return figure(
        title,
        "".join(out),
        summary=f"Heat map, {n_rows} by {n_columns} cells. Arrow keys move from cell to cell.",
        table=table,
        caption=caption,
        size=(max(x.stop + right, width), height),
        kind="heat",
        wide=wide,
        run=run,
        data={
            "grid": [x.start, y.start, cell, tall],
            "rows": list(rows),
            "columns": list(columns),
            "values": [[float(v) for v in row] for row in values],
            "labels": [row_label, column_label],
            "unit": unit,
        },
    )


def heat_table(
    names: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    support: np.ndarray,
    *,
    heading: str,
    first: Mapping[str, Sequence[str]],
    last: Mapping[str, Sequence[str]],
) -> str:
    """(R, C) shares as a table with coloured cells: it sorts, its row names stay in sight, and it can be read aloud.

    heading: of the names; first, last: columns of text beside the cells; support: (R, C) samples behind a share.
    """
    rows: list[list[str | Cell]] = [
        [
            name,
            *(column[r] for column in first.values()),
            *(_shaded(float(v), float(n)) for v, n in zip(values[r], support[r], strict=True)),
            *(column[r] for column in last.values()),
        ]
        for r, name in enumerate(names)
    ]
    head = [heading, *first, *columns, *last]
    return html_table(head, rows, look="heat" + (" turned" if len(columns) > 12 else ""))


def _shaded(value: float, n: float) -> Cell:
    if not np.isfinite(value):
        return Cell("–", look="h0")
    level = int(np.clip(np.ceil(value * LEVELS), 0, LEVELS))
    text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
    return Cell(text, look=f"h{level}{' thin' if n < THIN else ''}", key=value)


def _cells(levels: np.ndarray, x: Scale, y: Scale, cell: float, tall: float) -> Iterator[str]:
    gap = 1 if cell > 8 else 0
    rows, columns = levels.shape
    whole = f'width="{columns * cell:.2f}" height="{rows * tall:.2f}"'
    yield f'<rect class="h0" x="{x.start:g}" y="{y.start:g}" {whole}/>'
    box = f"h{cell - gap:.2f}v{tall - gap:.2f}h-{cell - gap:.2f}z"
    for level in range(1, LEVELS + 1):
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


def _names(rows: Sequence[str], columns: Sequence[str], x: Scale, y: Scale, turned: bool, every: int) -> Iterator[str]:
    """Beside the rows and below the columns."""
    for r, name in enumerate(rows):
        place = f'x="{x.start - 7}" y="{y(r + 0.5)}" dy=".33em" text-anchor="end"'
        yield f'<text class="tick" {place}>{_whole(name)}</text>'
    for c, name in enumerate(columns):
        at = x(c + 0.5)
        if turned:
            place = f'transform="translate({at + 3} {y.stop + 8}) rotate(-60)" text-anchor="end"'
        else:
            place = f'x="{at}" y="{y.stop + 16}" text-anchor="middle"'
        if c % every == 0:
            yield f'<text class="tick" {place}>{_whole(name)}</text>'


def _whole(name: str) -> str:
    return esc(cut(name, MOST_LETTERS)) + (f"<title>{esc(name)}</title>" if len(name) > MOST_LETTERS else "")


def _text(value: float) -> str:
    return number(float(value), 2)
