"""What every chart shares: scales, ticks, the accessible frame with its data table.

A chart is inline SVG drawn in user units of a small canvas, so that one drawing serves a phone and a wide
screen; colours are CSS variables, so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 46
LETTERS = 24
"""Of a name on one line."""


def esc(text: object) -> str:
    """Text made safe inside HTML and attributes."""
    return html.escape(str(text), quote=True)


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


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about ``count`` of them.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    step = _step(low, high, count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def nice_range(
    values: Sequence[float], floor: float | None = None, ceiling: float | None = None
) -> tuple[float, float]:
    """A range that holds all finite values, ends on ticks and stays within floor and ceiling."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high - low < 1e-9:
        pad = abs(high) * 0.1 or 0.5
        low, high = low - pad, high + pad
    step = _step(low, high, 5)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    low = low if floor is None else max(low, floor)
    high = high if ceiling is None else min(high, ceiling)
    return round(low, 12), round(high, 12)


def _step(low: float, high: float, count: int) -> float:
    """The least round number (1, 2 or 5 times a power of ten) that takes at most ``count`` steps."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def number(value: float, digits: int = 3) -> str:
    """A number for people; a dash for what is not defined."""
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}"
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def axes(x: Scale, y: Scale, x_ticks: Mapping[float, str], x_label: str, y_label: str) -> str:
    """Horizontal grid lines, tick labels and the two axis titles."""
    out = []
    for v in ticks(y.low, y.high):
        at = y(v)
        out.append(f'<line class="grid" x1="{x.start}" x2="{x.stop}" y1="{at}" y2="{at}"/>')
        out.append(f'<text class="tick" x="{x.start - 7}" y="{at}" dy=".33em" text-anchor="end">{v:g}</text>')
    for v, text in x_ticks.items():
        out.append(f'<text class="tick" x="{x(v)}" y="{y.start + 20}" text-anchor="middle">{esc(text)}</text>')
    out.append(f'<line class="axis" x1="{x.start}" x2="{x.stop}" y1="{y.start}" y2="{y.start}"/>')
    middle = (x.start + x.stop) / 2
    out.append(f'<text class="label" x="{middle}" y="{y.start + 40}" text-anchor="middle">{esc(x_label)}</text>')
    if y_label:
        side = (y.start + y.stop) / 2
        turn = f'transform="translate(13 {side}) rotate(-90)"'
        out.append(f'<text class="label" text-anchor="middle" {turn}>{esc(y_label)}</text>')
    return "".join(out)


def figure(
    title: str,
    drawing: str,
    *,
    summary: str,
    table: str,
    caption: str = "",
    legend: str = "",
    size: tuple[float, float] = (WIDTH, HEIGHT),
    data: dict[str, Any] | None = None,
    kind: str = "",
    wide: bool = False,
    run: int | None = None,
) -> str:
    """A chart with title, legend, caption and the numbers behind it.

    ``summary`` is what a screen reader says; ``data`` is what the page's script needs for its tooltips; ``run`` is the
    colour of the contender that it is all about.
    """
    large = f' style="min-width:{0.72 * size[0]:.0f}px"' if size[0] > 2 * WIDTH else ""  # it scrolls, its names stay
    payload = f'<script type="application/json">{_safe_json(data)}</script>' if data is not None else ""
    note = f"<p class='note'>{caption}</p>" if caption else ""
    return (
        f'<figure class="chart{" wide" if wide else ""}" data-kind="{esc(kind)}"{run_mark(run or 0, run is not None)}>'
        f"<figcaption>{esc(title)}</figcaption>{legend}"
        f'<div class="canvas"><svg viewBox="0 0 {size[0]:g} {size[1]:g}" role="img" tabindex="0"{large} '
        f'aria-label="{esc(title)}. {esc(summary)}">{drawing}</svg></div>'
        f"{note}<details><summary>Data table</summary><div class='scroll' tabindex='0' role='region' "
        f"aria-label='{esc(title)}, data'>{table}</div></details>{payload}</figure>"
    )


def legend(entries: Sequence[tuple[str, int]], runs: bool = False) -> str:
    """Buttons that hide and show a series of their figure; entries are (label, colour).

    ``runs``: the series are contenders, known by their colour (see ``palette``), which the page's filter hides.
    """
    items = "".join(
        f'<button type="button" aria-pressed="true" data-series="{i}"{run_mark(c, runs)}>'
        f'<span class="swatch c{colour(c)}"></span>{esc(label)}</button>'
        for i, (label, c) in enumerate(entries)
    )
    return f'<div class="legend" role="group" aria-label="Series shown">{items}</div>'


def run_mark(c: int, runs: bool = True) -> str:
    """What the page's filter knows a contender's row, series or figure by."""
    return f' data-run="{c}"' if runs else ""


@dataclass(frozen=True)
class Cell:
    """A table's cell that is more than a text."""

    text: str
    small: str = ""
    """A second line."""
    look: str = ""
    """CSS class."""
    key: float | None = None
    """What its column sorts by, where the text does not begin with the number."""


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    *,
    caption: str = "",
    runs: Sequence[int | None] = (),
    rest: Sequence[Sequence[str | Cell]] = (),
    look: str = "",
) -> str:
    """A table that can be sorted by its columns; the first column heads its row.

    ``runs``: colour of the contender of each row, for the page's filter; ``rest``: rows that stay below the others.
    """
    marks = ["" if c is None else run_mark(c) for c in runs] or [""] * len(rows)
    body = "".join(f"<tr{mark}>{_cells(row)}</tr>" for mark, row in zip(marks, rows, strict=True))
    below = "".join(f"<tr>{_cells(row)}</tr>" for row in rest)
    top = "".join(f'<th scope="col">{esc(h)}</th>' for h in head)
    name = f"<caption>{esc(caption)}</caption>" if caption else ""
    classes = " ".join(filter(None, ("sortable" if len(rows) > 1 else "", look)))
    kind = f' class="{classes}"' if classes else ""
    last = f'<tbody class="rest">{below}</tbody>' if rest else ""
    return f"<table{kind}>{name}<thead><tr>{top}</tr></thead><tbody>{body}</tbody>{last}</table>"


def _cells(row: Sequence[str | Cell]) -> str:
    return "".join(_cell(c, 'th scope="row"' if i == 0 else "td") for i, c in enumerate(row))


def _cell(cell: str | Cell, tag: str) -> str:
    end = tag.partition(" ")[0]
    if isinstance(cell, str):
        return f"<{tag}>{esc(cell)}</{end}>"
    look = f' class="{cell.look}"' if cell.look else ""
    key = "" if cell.key is None or not math.isfinite(cell.key) else f' data-v="{cell.key:.6g}"'
    small = f"<small>{esc(cell.small)}</small>" if cell.small else ""
    return f"<{tag}{look}{key}>{esc(cell.text)}{small}</{end}>"


def charts(drawn: Iterable[str], size: str = "") -> str:
    """Charts in a grid that fits the screen; nothing if there are none."""
    found = "".join(drawn)
    return f"<div class='charts {size}'>{found}</div>" if found else ""


def scroll(table: str, name: str) -> str:
    """A table that scrolls sideways by itself on narrow screens, and says so there."""
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{esc(name)}'>{table}</div>"


def tiles(found: Sequence[tuple[str, str, str]]) -> str:
    """Numbers to begin with: (number, what it is, beside what to read it)."""
    items = "".join(
        f"<div><dt>{esc(what)}</dt><dd class='big'>{esc(value)}</dd><dd>{esc(more)}</dd></div>"
        for value, what, more in found
    )
    return f"<dl class='tiles'>{items}</dl>" if items else ""


def fold(summary: str, content: str) -> str:
    """What few readers look for, folded away; nothing if there is nothing."""
    return f"<details class='fold'><summary>{esc(summary)}</summary>{content}</details>" if content else ""


def wrap_name(name: str) -> list[str]:
    """A name in at most two lines; the end of a very long one is cut, and stands in the data table."""
    return textwrap.wrap(name, LETTERS, max_lines=2, placeholder="…") or [""]


def name_room(names: Iterable[str]) -> float:
    """Canvas units that the widest of some wrapped names takes, in the larger letters of a phone."""
    return 24 + max(_width(part) for name in names for part in wrap_name(name))


def _width(text: str) -> float:
    return sum(11.2 if c.isupper() or c in "mw%+" else 5.0 if c in "ijlft.,:;' " else 8.7 for c in text)


def wrapped_name(name: str, x: float, y: float) -> str:
    """A name that ends at (x, y)."""
    parts = wrap_name(name)
    first = 0.33 - 0.5 * (len(parts) - 1)
    lines = "".join(f'<tspan x="{x:g}" dy="{first if i == 0 else 1:g}em">{esc(p)}</tspan>' for i, p in enumerate(parts))
    return f'<text class="name" y="{y:g}" text-anchor="end">{lines}</text>'


def cut(text: str, most: int) -> str:
    """Text of at most some length, an ellipsis for the rest."""
    return text if len(text) <= most else text[: most - 1] + "…"


def colour(index: int) -> int:
    """Colour class of the i-th series; 0 is the neutral colour of the baseline."""
    return index if index < 8 else 1 + (index - 1) % 7


def _safe_json(data: Any) -> str:
    # a "<" inside a string could begin "</script>" or "<!--" and change how the rest of the page is read
    return json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return None if not math.isfinite(data) else int(data) if data.is_integer() else round(data, 5)
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    return [_finite(v) for v in data] if isinstance(data, list | tuple) else data
