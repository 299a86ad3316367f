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

from fedtail.plots import Chart


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


Cells = Sequence[str | Cell]


@dataclass(frozen=True)
class Block:
    """A part of the page, drawn by the macro that is named like its class."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Text(Block):
    """A paragraph; ``Markup`` is taken as it is, anything else is escaped."""

    text: str
    look: str = ""

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True)
class Heading(Block):
    text: str


@dataclass(frozen=True)
class Items(Block):
    items: Sequence[str]
    look: str = ""

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class Tiles(Block):
    """Numbers to begin with: (number, what it is, beside what to read it)."""

    tiles: Sequence[tuple[str, str, str]]

    def __bool__(self) -> bool:
        return bool(self.tiles)


@dataclass(frozen=True)
class Table(Block):
    """A table that can be sorted by its columns; the first column heads its row."""

    head: Sequence[str]
    rows: Sequence[Cells]
    name: str = ""
    runs: Sequence[int | None] = ()
    """Colour of the contender of each row, for the page's filter."""
    rest: Sequence[Cells] = ()
    """Rows that stay below the others."""
    look: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Charts(Block):
    """Charts in a grid that fits the screen; those with nothing to draw are left out."""

    charts: Sequence[Chart]
    size: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "charts", [chart for chart in self.charts if chart])

    def __bool__(self) -> bool:
        return bool(self.charts)


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


def kept(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks that have something to show."""
    return [block for block in blocks if block]


def _kind(block: Block) -> str:
    return type(block).__name__.lower()


@cache
def environment() -> Environment:
    """Return the templates of the package; everything that is filled in is escaped."""
    from fedtail.report import scale, svg

    env = Environment(
        loader=PackageLoader("fedtail.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals |= {"svg": svg.svg, "ticks": scale.ticks, "colour": svg.shade_of, "edge": svg.WIDTH - 6}
    env.globals |= {"kind": _kind, "kept": kept, "finite": math.isfinite}
    env.tests["text"] = lambda value: isinstance(value, str)
    return env


def source(name: str) -> Markup:
    """Return a file of the package as it is, for style and script."""
    return Markup(files("fedtail.report").joinpath("templates", name).read_text(encoding="utf-8"))


def template(name: str, **values: Any) -> str:
    """Return a filled-in template."""
    return environment().get_template(name).render(**values)


def markdown(name: str, **values: Any) -> str:
    """Return a filled-in Markdown template; what is filled in cannot begin a table's cell or a line."""
    env = Environment(
        loader=PackageLoader("fedtail.report"),
        autoescape=False,
        undefined=StrictUndefined,
        finalize=lambda v: (
            " ".join(str(v).replace("|", "\\|").replace("<", "&lt;").split()) if isinstance(v, str) else v
        ),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template(name).render(**values)
