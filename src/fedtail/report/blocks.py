"""What the page is made of: texts, tables, charts and folds as data; templates turn them into HTML, and escape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedtail.plots import Heat, Lines, Rows, shade
from fedtail.words import NONE, fixed, listing, number, percent, plural, signed, size, times


@dataclass(frozen=True)
class Cell:
    """A table's cell that is more than a text."""

    text: str
    small: str = ""
    """A second line."""
    look: str = ""
    """CSS class."""
    key: float = math.nan
    """What its column sorts by, where the text does not begin with the number."""

    def __str__(self) -> str:
        small = self.small if self.small[:1] in ("", "±", "(", "[") else f"({self.small})"
        return f"{self.text} {small}".strip()


Cells = Sequence[str | Cell]
LEVELS = 10
"""Colours of a map."""
MOST_PANELS = 8
"""Methods beyond which not each has a chart or map of its own."""
T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """A part of the page, drawn by the macro that is named like its class; its first field is what it shows."""

    def __bool__(self) -> bool:
        return bool(next(iter(vars(self).values())))


@dataclass(frozen=True)
class Text(Block):
    """A paragraph; ``Markup`` is taken as it is, anything else is escaped."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Items(Block):
    items: Sequence[str]
    look: str = ""


@dataclass(frozen=True)
class Tiles(Block):
    """The outcome in a few numbers to begin with, each beside what it is to be read against."""

    outcome: Mapping[str, Any]


@dataclass(frozen=True)
class Table(Block):
    """A table that can be sorted by its columns; the first column heads its row."""

    rows: Sequence[Cells]
    head: Sequence[str]
    name: str = ""
    look: str = ""
    runs: Sequence[int | None] = ()
    """Colour of the contender of each row, for the page's filter."""
    rest: Sequence[Cells] = ()
    """Rows that stay below the others."""

    def markdown(self) -> str:
        """Return the table as GitHub-flavoured Markdown."""

        def line(cells: Cells) -> str:
            return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"

        rule = "|---|" + "---:|" * (len(self.head) - 1)
        return "\n".join([line(self.head), rule, *map(line, [*self.rows, *self.rest])])


Line = Mapping[str, str | Cell]
"""A row by the heads of its columns."""


def table_of(
    lines: Iterable[Line],
    name: str = "",
    look: str = "",
    colours: Mapping[str, int] | None = None,
    *,
    rest: Iterable[Line] = (),
) -> Table:
    """Return a table of lines, without the columns that none of them fills; the page's filter hides those whose
    ``Method`` is among ``colours``."""
    every, below = list(lines), list(rest)
    heads = dict.fromkeys(head for line in every for head in line)
    kept = [head for head in heads if any(str(line.get(head, "")) not in ("", NONE) for line in every)]
    rows, others = ([[line.get(head, "") for head in kept] for line in part] for part in (every, below))
    labels = [line.get("Method", "") for line in every]
    runs = [(colours or {}).get(label.text if isinstance(label, Cell) else label) for label in labels]
    return Table(rows, kept, name, look, runs, others)


def shaded(value: float, share: float, look: str = "") -> Cell:
    """Return a cell of a map, of a stronger colour the larger a share is; most have the weakest, and need no class."""
    level = int(np.clip(np.ceil(share * LEVELS), 0, LEVELS)) if math.isfinite(share) else 0
    text = f"{value:g}" if value == np.floor(value) else fixed(value, 2).lstrip("0")
    return Cell(text, look=" ".join([f"h{level}"] * (level > 0) + [look] * bool(look)))


def map_of(chart: Heat) -> Table:
    """Return a map as a table with coloured cells: it sorts, its row names stay in sight, and it can be read aloud."""
    lines = zip(chart.rows, chart.values.tolist(), chart.shades.tolist(), strict=True)
    rows: list[Cells] = [[name, *map(shaded, values, shades)] for name, values, shades in lines]
    head = [f"{chart.row_label} / {chart.column_label}", *chart.columns]
    return Table(rows, head, chart.title, map_look(chart.columns))


def map_look(columns: Sequence[str]) -> str:
    """Return the look of a map: many columns have turned heads; of very many, numbers are shown where pointed at."""
    return "heat" + " turned" * (len(columns) > 12) + " dense" * (len(columns) > 30)


@dataclass(frozen=True)
class Charts(Block):
    """Charts in a grid that fits the screen; those with nothing to draw are left out."""

    charts: Sequence[Lines | Rows | None]
    size: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "charts", [chart for chart in self.charts if chart])


def first_of(items: Sequence[T], what: str, file: str, most: int = MOST_PANELS) -> tuple[Sequence[T], Text]:
    """Return the first of some items, and a note on how many are left out and which file has their numbers."""
    more = len(items) - most
    text = f"Left out: {plural(more, f'more {what}')}; the numbers are in {file} in each run's folder."
    return items[:most], Text(text if more > 0 else "", "note")


@dataclass(frozen=True)
class Fold(Block):
    """What few readers look for, folded away."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False
    run: int | None = None

    def __bool__(self) -> bool:
        return any(self.blocks)


def folded(label: str, block: Block, run: int | None, *, is_open: bool) -> Block:
    """Return what is about one of several contenders, folded under its label; of the only one as it is."""
    return block if run is None else Fold(label, [block], is_open, run)


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading."""

    key: str
    title: str
    blocks: Sequence[Block]


@cache
def environment(kind: str = "html") -> Environment:
    """Return the templates of the package. In a page everything that is filled in is escaped; into Markdown nothing is
    filled in that begins a cell, line or tag."""
    env = Environment(
        loader=PackageLoader("fedtail.report"),
        undefined=StrictUndefined,
        autoescape=kind == "html",
        finalize=_cell_text if kind == "md" else None,
        trim_blocks=kind != "txt",
        lstrip_blocks=True,
        keep_trailing_newline=kind != "html",
    )
    env.globals |= {f.__name__: f for f in (fixed, listing, percent, plural, signed, size, times)} | {
        "finite": math.isfinite
    }
    if kind == "html":
        from fedtail.report import svg

        env.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
        env.globals |= {"svg": svg.svg, "ticks": svg.ticks, "rounded": svg.rounded, "edge": svg.WIDTH - 6}
        env.globals |= {"value_text": svg.value_text, "colour": shade, "number": number}
        env.globals |= {"kind": lambda block: type(block).__name__.lower()}
    return env


def template(name: str, **values: Any) -> str:
    """Return a filled-in template."""
    return environment(name.rpartition(".")[2]).get_template(name).render(**values)


def _cell_text(value: Any) -> Any:
    if isinstance(value, Table):
        return value.markdown().replace("<", "&lt;")
    return " ".join(value.replace("|", "\\|").replace("<", "&lt;").split()) if isinstance(value, str) else value


def say(paragraph: str, **values: Any) -> str:
    """Return a paragraph of ``sentences.txt`` as plain text in one line; empty where it has nothing to say."""
    macro = getattr(environment("txt").get_template("sentences.txt").module, paragraph)
    return " ".join(str(macro(**values)).split()).replace(" ,", ",").replace(" .", ".")
