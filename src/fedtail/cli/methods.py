"""``fedtail methods``: what there is to compare."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedtail.cli.options import Json
from fedtail.cli.progress import terminal
from fedtail.methods.registry import describe_methods, methods_markdown, options_text


def methods_command(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/methods.md.")] = False,
) -> None:
    """List the methods: paper, what crosses the wire beyond FedAvg, what a client keeps, options and defaults."""
    if as_json:
        typer.echo(json.dumps({"methods": describe_methods()}))
        return
    if markdown:
        typer.echo(methods_markdown(), nl=False)
        return
    console = terminal()
    for m in describe_methods():
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", min_width=9)
        table.add_column()
        table.add_row("paper", m["paper"])
        table.add_row("wire", m["wire"])
        table.add_row("client", "keeps " + ("nothing" if m["client_state"] == "none" else m["client_state"]))
        table.add_row("options", ", ".join(options_text(m["defaults"])))
        console.print(Text.assemble((m["name"], "bold"), f"  {m['title']}"))
        console.print(Padding(table, (0, 0, 1, 2)))
