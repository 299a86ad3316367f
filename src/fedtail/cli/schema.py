"""``fedtail data schema``: a schema file for sites to agree on, proposed from one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.progress import print_notes
from fedtail.data.tables import propose_schema, schema_text
from fedtail.data.tables.pooled import names_option
from fedtail.errors import FedtailError, writing


def schema_command(
    table: Annotated[Path, typer.Argument(help="One site's table: CSV, TSV or Parquet.")],
    label: Annotated[str, typer.Option(help="Column that holds the class.")],
    site: Annotated[str | None, typer.Option(help="Column that names the site; not an input.")] = None,
    exclude: Annotated[str, typer.Option(help="Columns to leave out, comma-separated.")] = "",
    categories: Annotated[str, typer.Option(help="Columns of codes that look like numbers, comma-separated.")] = "",
    max_levels: Annotated[int, typer.Option(min=2, help="Categories with more levels are hashed.")] = 64,
    out: Annotated[Path | None, typer.Option(help="File to write, .toml or .json; default: standard output.")] = None,
) -> None:
    """Propose a schema from one table: columns, levels and classes, without any statistics.

    Complete it by hand (levels and classes other sites have), give it to every site, and train with
    `fedtail run --tables DIR --schema schema.toml`.
    """
    if out is not None and out.suffix not in (".toml", ".json"):
        raise FedtailError(f"--out {str(out)!r} must end in .toml or .json")
    schema, notes = propose_schema(
        table,
        label,
        site=site,
        exclude=names_option("exclude", exclude),
        categories=names_option("categories", categories),
        max_levels=max_levels,
    )
    text = schema_text(schema, out.suffix if out is not None else ".toml")
    if out is None:
        typer.echo(text, nl=False)
    else:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
    print_notes(notes)
