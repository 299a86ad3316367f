"""Result tables in the terminal."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedtail.cli.progress import terminal
from fedtail.report.tables import COLUMNS, Table, difference, footnote, mean_spread

NARROW = ("balanced_accuracy", "weighted_f1", "accuracy", "head")
"""Columns left out, in this order, where the terminal is too narrow; files and reports have them all."""


def print_table(table: Table, console: Console | None = None) -> None:
    """One row per arm, mean ± spread over seeds, the best of each column in bold, the majority-only floor dimmed."""
    out = console or terminal()
    kept = list(range(len(table.columns)))
    label = max(len(row.label) for row in table.rows)
    for name in NARROW:
        if label + 1 + 16 * len(kept) > out.width:
            kept = [i for i in kept if table.columns[i] != name]
    tested = len(table.rows) > 1 and label + 4 + 16 * len(kept) + 24 <= out.width
    shown = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("method", no_wrap=True)
    for i in kept:
        shown.add_column(COLUMNS[table.columns[i]], justify="right", no_wrap=True)
    if tested:
        shown.add_column(f"Δ {COLUMNS[table.metric]}", justify="right", no_wrap=True)
        shown.add_column("p", justify="right", no_wrap=True)
    for row in table.rows:
        cells = [
            Text(mean_spread(row.cells[i]), style="bold green" if math.isclose(row.cells[i][0], table.best(i)) else "")
            for i in kept
        ]
        delta, _, p = difference(row)
        shown.add_row(row.label, *cells, *((delta or "–", p or "–") if tested else ()))
    if table.floor:
        floors = [table.floor.get(table.columns[i]) for i in kept]
        shown.add_row("majority only", *("–" if f is None else f"{f:.3f}" for f in floors), style="dim")
    out.print(shown)
    seeds = max(row.seeds for row in table.rows)
    if tested and seeds > 1:
        out.print(Text(footnote(table), style="dim"))
    elif seeds > 1:
        out.print(Text(f"mean ± standard deviation over {seeds} seeds; the report has the paired tests", style="dim"))
