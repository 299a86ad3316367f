"""What the page is made of: texts, tables, charts and folds as data; templates turn them into HTML, and escape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedtail.plots import Chart, shade
from fedtail.report.comparison import Comparison, Contender
from fedtail.words import fixed, percent, plural, shortened, signed, times


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
class Heading(Block):
    text: str


@dataclass(frozen=True)
class Items(Block):
    items: Sequence[str]
    look: str = ""


@dataclass(frozen=True)
class Tiles(Block):
    """Numbers to begin with: (number, what it is, beside what to read it)."""

    tiles: Sequence[tuple[str, str, str]]


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


def table_of(
    comparison: Comparison,
    rows: Iterable[tuple[Contender, Cells]],
    head: Sequence[str],
    name: str,
    look: str = "",
    *,
    at: int = 0,
    always: bool = False,
) -> Table:
    """Return a table whose rows are of contenders; where these are several (or ``always``), the column ``at`` says of
    which, and the page's filter hides the rows."""
    every, named = list(rows), always or comparison.several
    labelled = [[*cells[:at], one.label, *cells[at:]] if named else cells for one, cells in every]
    runs = [comparison.own_colour(one) for one, _ in every]
    return Table(labelled, [*head[:at], "Method", *head[at:]] if named else head, name, look, runs)


@dataclass(frozen=True)
class Charts(Block):
    """Charts in a grid that fits the screen; those with nothing to draw are left out."""

    charts: Sequence[Chart | None]
    size: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "charts", [chart for chart in self.charts if chart])


@dataclass(frozen=True)
class Fold(Block):
    """What few readers look for, folded away."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False
    run: int | None = None

    def __bool__(self) -> bool:
        return any(self.blocks)


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading."""

    key: str
    title: str
    blocks: Sequence[Block]


@cache
def environment() -> Environment:
    """Return the templates of the package; everything that is filled in is escaped."""
    from fedtail.report import svg

    env = _environment(autoescape=True)
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    env.globals |= {"svg": svg.svg, "ticks": svg.ticks, "rounded": svg.rounded, "edge": svg.WIDTH - 6, "colour": shade}
    env.globals |= {"value_text": svg.value_text, "shortened": lambda name: shortened(name, svg.MOST_LETTERS)}
    env.globals |= {"kind": lambda block: type(block).__name__.lower(), "finite": math.isfinite}
    return env


def _environment(**options: Any) -> Environment:
    look: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, **options}
    return Environment(loader=PackageLoader("fedtail.report"), **look)


def source(name: str) -> Markup:
    """Return a file of the package as it is, for style and script."""
    return Markup(files("fedtail.report").joinpath("templates", name).read_text(encoding="utf-8"))


def template(name: str, **values: Any) -> str:
    """Return a filled-in template of the page."""
    return environment().get_template(name).render(**values)


@cache
def _plain(**options: Any) -> Environment:
    env = _environment(autoescape=False, keep_trailing_newline=True, **options)
    env.globals |= {f.__name__: f for f in (fixed, percent, plural, signed, times)} | {"finite": math.isfinite}
    return env


def _cell_text(value: Any) -> Any:
    if isinstance(value, Table):
        return value.markdown().replace("<", "&lt;")
    return " ".join(value.replace("|", "\\|").replace("<", "&lt;").split()) if isinstance(value, str) else value


def plain_template(name: str, **values: Any) -> str:
    """Return a filled-in template of plain text; into Markdown nothing is filled in that begins a cell, line or tag."""
    env = _plain(finalize=_cell_text) if name.endswith(".md") else _plain()
    return env.get_template(name).render(**values)


def say(paragraph: str, **values: Any) -> str:
    """Return a paragraph of ``sentences.txt`` as plain text in one line; empty where it has nothing to say."""
    macro = getattr(_plain(trim_blocks=False).get_template("sentences.txt").module, paragraph)
    return " ".join(str(macro(**values)).split()).replace(" ,", ",").replace(" .", ".")
