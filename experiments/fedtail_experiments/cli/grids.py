"""Grids in the terminal: our results alongside the paper's."""

from __future__ import annotations

from rich.text import Text

from fedtail.cli.progress import terminal
from fedtail.cli.tables import bare_table
from fedtail_experiments.paper.tables import Entry, GridResult


def print_grid(result: GridResult) -> None:
    """Print a table per block of a grid, the paper's numbers dimmed."""
    out = terminal()
    columns = result.used("column")
    for block in result.used("block"):
        title = result.grid.title if block == "all" else f"{result.grid.title}: {block}"
        out.print(Text.assemble("\n", (title, "bold"), f" ({result.grid.metric.replace('_', ' ')})"), soft_wrap=True)
        shown = bare_table()
        shown.add_column("", no_wrap=True)
        for column in columns:
            shown.add_column(column, justify="right")
        for row in result.used("row"):
            entries = [result.entry(block, row, column) for column in columns]
            if any(entries):
                shown.add_row(row, *map(_beside_paper, entries))
        out.print(shown)
    if any(entry.paper is not None for entry in result.entries):
        out.print("in parentheses: the paper's values", style="dim")
    if result.grid.notes:
        out.print(" ".join(result.grid.notes.split()), style="dim")


def _beside_paper(entry: Entry | None) -> Text:
    if entry is None or entry.paper is None:
        return Text(entry.text() if entry else "")
    return Text.assemble(entry.text(), (f" ({entry.paper:.4g})", "dim"))
