"""Result tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedtail.cli.progress import terminal
from fedtail.core.metrics import METRICS
from fedtail.report.tables import Table, difference, footnote
from fedtail.words import mean_spread

FLOOR = "majority only"
LABEL = 28
"""Letters of a row's name for which columns are left out; a longer one wraps."""


def bare_table(*headers: str, **options: Any) -> RichTable:
    """The look of all tables in the terminal: a line under the header and no frame."""
    return RichTable(*headers, box=box.SIMPLE_HEAD, pad_edge=False, **options)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print mean ± spread over seeds, in bold what is clearly the best of a column, the majority-only floor dimmed."""
    out = console or terminal()
    kept = list(range(len(table.columns)))
    measured = [(row.label.replace("yardstick: ", "* "), row) for row in table.yardsticks]
    names = [*(row.shown for row in table.rows), *(name for name, _ in measured), FLOOR]
    label = min(max(map(len, names)), LABEL)

    def room(i: int) -> int:
        cells = (mean_spread(*row.cells[i]) for row in (*table.rows, *table.yardsticks))
        return 3 + max(len(METRICS[table.columns[i]].title), *map(len, cells))

    others = [i for i in kept if table.columns[i] != table.metric]
    for least in sorted(others, key=lambda i: METRICS[table.columns[i]].priority):
        if label + 1 + sum(map(room, kept)) > out.width:  # files and reports have them all
            kept.remove(least)
    tested = len(table.rows) > 1 and label + 1 + sum(map(room, kept)) + 24 <= out.width
    shown = bare_table(title=table.title, title_justify="left", title_style="bold")
    shown.add_column(
        "method", overflow="fold", min_width=label
    )  # so that a long label wraps, where numbers would be cut
    for i in kept:
        shown.add_column(METRICS[table.columns[i]].title, justify="right", no_wrap=True)
    if tested:
        shown.add_column(f"Δ {METRICS[table.metric].title}", justify="right", no_wrap=True)
        shown.add_column("p", justify="right", no_wrap=True)
    for row in table.rows:
        cells = [Text(mean_spread(*row.cells[i]), style="bold green" if table.marked(row, i) else "") for i in kept]
        delta, _, p = difference(row)
        shown.add_row(row.shown, *cells, *((delta or "–", p or "–") if tested else ()))
    if table.floor:
        floors = [table.floor.get(table.columns[i]) for i in kept]
        shown.add_row(FLOOR, *("–" if f is None else f"{f:.3f}" for f in floors), style="dim")
    for name, row in measured:
        values = [mean_spread(*row.cells[i]) for i in kept]
        shown.add_row(name, *values, *(("", "") if tested else ()), style="dim")
    out.print(shown)
    if measured:
        out.print(Text("* yardsticks are neither ranked nor tested", style="dim"))
    seeds = max(row.seeds for row in table.rows)
    if tested and seeds > 1:
        out.print(Text(footnote(table), style="dim"))
    elif seeds > 1:
        out.print(Text(f"mean ± standard deviation over {seeds} seeds; the report has the paired tests", style="dim"))
