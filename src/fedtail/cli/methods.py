"""``fedtail methods``: what there is to compare, and whether a method of your own may join."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedtail.cli.options import Json
from fedtail.cli.progress import terminal
from fedtail.errors import FedtailError
from fedtail.federate.conformance import check_method
from fedtail.methods import METHODS
from fedtail.methods.registry import describe_methods, methods_markdown, options_text

app = typer.Typer(invoke_without_command=True)


@app.callback()
def methods(
    context: typer.Context,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/methods.md.")] = False,
) -> None:
    """List the methods: paper, what they send beyond FedAvg, client state, options and defaults."""
    if context.invoked_subcommand is not None:
        return
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


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="METHOD", help="A method name, or your own file.py:Name.")],
    as_json: Json = False,
) -> None:
    """Test a method on every engine: finite, repeatable, resumable, identical on fast paths and at real sites."""
    results = []
    for result in check_method(METHODS.build(name)):
        results.append(result)
        if not as_json:
            typer.echo(f"{'no ' if result.problem else 'yes'}  {result.claim}" + f": {result.problem}".rstrip(": "))
    if as_json:
        typer.echo(json.dumps({"method": name, "checks": [{"claim": c.claim, "problem": c.problem} for c in results]}))
    failed = [c for c in results if c.problem]
    if failed:
        raise FedtailError(
            f"method {name!r} fails {len(failed)} of {len(results)} checks; the first failure: {failed[0].claim}"
        )
