"""Result tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedtail.cli.progress import terminal
from fedtail.core.metrics import METRICS
from fedtail.report.blocks import Cell
from fedtail.report.blocks import Table as TableBlock
from fedtail.report.tables import Table, footnote
from fedtail.words import listing, plural

MOST = 20
"""Classes or sites that a terminal shows; the report and ``--json`` have all."""
LABEL = 28
"""Letters of a row's name for which columns are left out; a longer one wraps."""


def bare_table(*headers: str, **options: Any) -> RichTable:
    """The look of all tables in the terminal: a line under the header and no frame."""
    return RichTable(*headers, box=box.SIMPLE_HEAD, pad_edge=False, **options)


def rich_table(block: TableBlock, **options: Any) -> RichTable:
    """Return a table of the report as a terminal shows it: in bold what is best, dimmed what others are measured by."""
    shown = bare_table(**options)
    for i, name in enumerate(block.head):  # a long label or title wraps, where numbers would be cut
        widest = max((len(_text(row[i])) for row in (*block.rows, *block.rest)), default=0)
        least = max(*map(len, name.split()), min(widest, LABEL) if i == 0 else widest, 0)
        look: dict[str, Any] = {"justify": "right"} if i else {"overflow": "fold"}
        shown.add_column(name, min_width=least, no_wrap=least == max(len(name), widest), **look)
    for row in block.rows:
        best = (isinstance(cell, Cell) and cell.look == "best" for cell in row)
        shown.add_row(*(Text(_text(c), style="bold green" if mark else "") for c, mark in zip(row, best, strict=True)))
    for row in block.rest:
        shown.add_row(*map(_text, row), style="dim")
    return shown


def print_block(block: TableBlock, columns: Sequence[str] = (), most: int = MOST, of: str = "rows") -> None:
    """Print the first rows of a table of the report, all columns or some; nothing where it is empty."""
    if block:
        kept = [i for i, name in enumerate(block.head) if not columns or name in columns]
        rows, head = [[row[i] for i in kept] for row in block.rows], [block.head[i] for i in kept]
        shown = TableBlock(rows[:most], head)
        if table_width(shown) > terminal().width:  # intervals are the first to go
            shown = TableBlock([[c.text if isinstance(c, Cell) else c for c in row] for row in rows[:most]], head)
        terminal().print(rich_table(shown))
        if len(rows) > most:
            terminal().print(f"the first {most} of {len(rows):,} {of}; the report lists all")


def print_table(table: Table, console: Console | None = None) -> None:
    """Print mean ± spread over seeds. Columns that the terminal has no room for are left out: files and reports have
    them all."""
    out = console or terminal()
    columns = list(table.columns)

    for least in sorted(columns[1:], key=lambda c: METRICS[c].priority):
        if table_width(table.block(columns, test=False)) > out.width:
            columns.remove(least)
    tested = len(table.rows) > 1 and table_width(table.block(columns)) <= out.width
    look = {"title": table.comparison.title, "title_justify": "left", "title_style": "bold"}
    out.print(rich_table(table.block(columns, test=tested), **look))
    if table.yardsticks:
        below = listing([row.label for row in table.yardsticks])
        out.print(Text(f"{below} are yardsticks: neither ranked nor tested", style="dim"))
    if table.seeds > 1:
        short = f"mean ± standard deviation over {plural(table.seeds, 'seed')}; the report has the paired tests"
        out.print(Text(footnote(table) if tested else short, style="dim"))


def table_width(block: TableBlock) -> int:
    """Return the columns of a terminal that a table needs if only the labels of its rows are wrapped."""
    widths = [max(len(_text(c)) for c in cells) for cells in zip(block.head, *block.rows, *block.rest, strict=True)]
    return min(widths[0], LABEL) + 1 + sum(3 + width for width in widths[1:])


def _text(cell: str | Cell) -> str:
    """Return a cell without the interval of a difference, for which a terminal has no room."""
    return cell.text if isinstance(cell, Cell) and cell.small.startswith("[") else str(cell)
