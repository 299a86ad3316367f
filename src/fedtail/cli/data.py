"""``fedtail data``: list, get and inspect data sets, propose a schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fedtail import datasets
from fedtail.cli.options import SOURCE, DataDir, Json, config_flags, split_arguments
from fedtail.cli.progress import print_notes, terminal
from fedtail.cli.tables import bare_table, rich_table, table_width
from fedtail.data.inspection import Inspection, inspect, ratio
from fedtail.data.registry import DATASETS
from fedtail.data.tables.columns import Choices
from fedtail.data.tables.schema import schema_text
from fedtail.data.tables.sites import propose_schema
from fedtail.errors import FedtailError, writing
from fedtail.report.blocks import Table
from fedtail.runs.build import build_federation
from fedtail.runs.config import load_config
from fedtail.words import listing

app = typer.Typer(help="List, download and inspect data sets.", no_args_is_help=True)
TALL = 24
"""Most sites in a table."""


@app.command("list")
def list_command(
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List data sets, their options, and whether their files are downloaded."""
    entries = datasets.overview(data_dir)
    if as_json:
        typer.echo(json.dumps([vars(e) for e in entries]))
        return
    table = bare_table()
    for column in ("name", "files", "description"):
        table.add_column(column, no_wrap=column != "description")
    for e in entries:
        lines = [e.about, *([f"terms: {e.terms}"] if e.terms else []), f"options: {', '.join(e.options)}"]
        table.add_row(e.name, e.state, Text("\n").join([Text(lines[0]), *(Text(v, style="dim") for v in lines[1:])]))
    terminal().print(table)


@app.command("get")
def get_command(
    names: Annotated[list[str], typer.Argument(help="Data sets to download; see `fedtail data list`.")],
    data_dir: DataDir = None,
) -> None:
    """Download public data sets, with checksums."""
    for name in names:
        DATASETS[name]  # a misspelt name is known before the first download
    for name in names:
        folder = datasets.get(name, data_dir)
        typer.echo(f"{name}  {folder}" if folder else f"{name}  needs no download")


@app.command("inspect")
@config_flags(*SOURCE, "data_dir", "clients", "partition", "alpha", "seed")
def inspect_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME] [SECTION.KEY=VALUE]...", help="A data set, then overrides.")
    ] = None,
    *,
    flags: dict[str, Any],
    rate: Annotated[float, typer.Option(help="Resampling rate for the grouping shown.")] = 0.6,
    groups: Annotated[int, typer.Option(help="Number of groups H.")] = 2,
    as_json: Json = False,
) -> None:
    """Show the site-by-class table, imbalance, missing classes, and each site's class groups.

    `fedtail data inspect adult`, `fedtail data inspect cifar10 data.imbalance=100 --clients 20`,
    `fedtail data inspect --images parts/`, `fedtail data inspect --table t.csv --label severity --site state`.
    """
    name, overrides = split_arguments(arguments)
    if name is not None:
        if "data.name" in flags:
            other = flags.get("data.path", flags["data.name"])
            raise FedtailError(f"{name!r} and {other!r} both name the data; give only one")
        if Path(name).exists() and name not in DATASETS:
            raise FedtailError(
                f"{name!r} is a file or folder, not a data set; use --table {name} --label COLUMN, --tables or --images"
            )
        flags["data.name"] = name
    view = inspect(build_federation(load_config(None, overrides, flags)), rate, groups)
    if as_json:
        typer.echo(json.dumps(view.to_dict()))
    else:
        show(view)


def show(view: Inspection, width: int | None = None) -> None:
    """Print an inspection; ``*`` marks each site's rarest group, ``·`` a class it lacks."""
    out, data = terminal(width=width), view.federation
    k, c = view.table.shape
    shape = " x ".join(map(str, data.input_shape))
    out.print(
        f"{data.name}: {view.total.sum():,} training, {sum(map(len, data.validation)):,} validation, "
        f"{view.test.sum():,} test samples of {shape} values, {c} classes, {k:,} sites",
        soft_wrap=True,
    )
    whole = _by_class(view)
    blocks = [whole] if k <= TALL and table_width(whole) <= out.width else [_by_site(view), _classes(view)]
    for block in blocks:
        out.print(rich_table(block))
    lacking = [i for i in range(k) if view.missing(i)]
    dot = f"· missing ({len(lacking):,} of {k:,} sites); " if whole in blocks and (view.table == 0).any() else ""
    lines = [
        f"* rarest of {view.n_groups} groups at rate {view.rate:g}; {dot}epoch: samples per epoch after resampling",
        f"label skew {view.skew:.3f} (0: every site has the global class mix; near 1: sites share almost no classes)",
        *(f"  {data.sites[i]} lacks {listing(view.missing(i), 6)}" for i in lacking[:5]),
        *([f"  and {len(lacking) - 5:,} more sites; --json lists all"] if len(lacking) > 5 else []),
    ]
    for line in (*lines, *(f"note: {note}" for note in data.notes)):
        out.print(line, soft_wrap=True)


def _by_class(view: Inspection) -> Table:
    """A row per site, a column per class, rarest first."""
    last = view.n_groups - 1

    def cell(k: int, c: int) -> str:
        n = int(view.table[k, c])
        return "·" if n == 0 else f"{n:,}*" if last and view.groups[k, c] == last else f"{n:,}"

    sites, names = view.federation.sites, [view.federation.classes[c] for c in view.order]
    rows = [[site, *(cell(k, c) for c in view.order), *_figures(view, k)] for k, site in enumerate(sites)]
    rest = [
        [label, *(f"{n:,}" for n in counts[view.order]), f"{counts.sum():,}", f"{ratio(counts):.4g}", ""]
        for label, counts in (("all sites", view.total), ("test", view.test))
    ]
    return Table(rows, ["site", *names, "samples", "imbalance", "epoch"], rest=rest)


def _by_site(view: Inspection) -> Table:
    """A row per site with the number of classes in each group; the middle left out where sites are many."""
    k, last = len(view.table), view.n_groups - 1
    rows = []
    for i in range(k) if k <= TALL else [*range(TALL // 2), *range(k - TALL // 2, k)]:
        rare = int((view.groups[i] == last).sum()) if last else 0
        common = int((view.groups[i] >= 0).sum()) - rare
        missing = str(len(view.missing(i)))
        rows.append([view.federation.sites[i], str(common), f"{rare}*", missing, *_figures(view, i)])
    if k > TALL:
        rows.insert(TALL // 2, ["…"] * 7)
    return Table(rows, ["site", "common classes", "rarest group", "missing", "samples", "imbalance", "epoch"])


def _classes(view: Inspection) -> Table:
    """The classes by name, rarest first, where the table of sites has no room for them."""
    names, have = view.federation.classes, (view.table > 0).sum(0)
    order = view.order[: TALL * 2]
    rows = [[names[c], f"{view.total[c]:,}", f"{view.test[c]:,}", f"{have[c]:,}"] for c in order]
    return Table(rows, ["class", "all sites", "test", "sites with it"])


def _figures(view: Inspection, k: int) -> list[str]:
    return [f"{view.table[k].sum():,}", f"{ratio(view.table[k]):.4g}", f"{view.epoch[k]:,}"]


@app.command("schema")
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
    choices = Choices(exclude, categories, max_levels=max_levels)
    schema, notes = propose_schema(table, label, site=site, choices=choices)
    text = schema_text(schema, out.suffix if out is not None else ".toml")
    if out is None:
        typer.echo(text, nl=False)
    else:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
    print_notes(notes)
