"""``fedtail tune``: the rate search alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich import box
from rich.table import Table as RichTable

from fedtail.checkpoint import write_atomically
from fedtail.cli.options import (
    DataDir,
    Dataset,
    Images,
    Label,
    Site,
    Table,
    Tables,
    data_flags,
    rate_flags,
    split_arguments,
)
from fedtail.cli.progress import RoundProgress, console
from fedtail.config import load_config
from fedtail.core.errors import FedtailError
from fedtail.rates.fixed import fixed_section
from fedtail.run import run


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="A TOML file or run folder, then overrides."),
    ] = None,
    dataset: Dataset = None,
    table: Table = None,
    tables: Tables = None,
    images: Images = None,
    label: Label = None,
    site: Site = None,
    method: Annotated[str | None, typer.Option(help="Method (method.name).")] = None,
    rates: Annotated[
        str | None,
        typer.Option(help="Search: fedhoo (default), fedhoo_clusters, hoo, fast, locally_optimal, grid."),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients (data.clients).")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds at most (run.rounds).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (run.seed).")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder (run.name).")] = None,
    out: Annotated[str | None, typer.Option(help="Folder that holds run folders (run.folder).")] = None,
    save: Annotated[
        Path | None, typer.Option(help="File for the rates, .toml or .json; by default rates.toml in the run folder.")
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, cuda:1 ... (engine.device).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted search.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Search resampling rates, stop when they are found, and save them.

    `fedtail tune --save rates.toml`, then `fedtail run --rates rates.toml` trains with the rates it found. Any other
    scalar of the local step is searched with `rates.searches=lr rates.low=0.01 rates.high=0.4 rates.log=true`.
    """
    path, overrides = split_arguments(arguments)
    if save is not None and save.suffix not in (".toml", ".json"):
        raise FedtailError(f"--save {str(save)!r} must end in .toml or .json")
    flags: dict[str, Any] = {
        **data_flags(dataset, table, tables, images, label, site), **rate_flags(rates or _search(path, overrides)),
        "method.name": method, "data.clients": clients, "run.rounds": rounds, "run.seed": seed, "run.name": name,
        "run.folder": out, "data.dir": data_dir, "engine.device": device, "run.search_only": True,
    }  # fmt: skip
    config = load_config(path, overrides, flags)
    with RoundProgress(f"tune {config.rates.name}", config.run.rounds, quiet=quiet) as progress:
        result = run(config, resume=resume, on_round=progress, on_start=lambda _, done: progress.start(done))
    folder, last = result.folder or Path(), result.history[-1]
    section = fixed_section(last)
    target = save or folder / "rates.toml"
    text = tomli_w.dumps({"rates": section}) if target.suffix == ".toml" else json.dumps({"rates": section}, indent=1)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise FedtailError(f"--save {str(target)!r} cannot be written: {error.strerror}") from None
    sites = json.loads((folder / "clients.json").read_text())["sites"]
    finished = not last["searching"]
    if as_json:
        found = {"run": str(folder), "file": str(target), "rounds": len(result.history), "finished": finished}
        typer.echo(json.dumps({**found, "sites": sites, **section}))
        return
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("client")
    shown.add_column(section.get("searches", "rate"), justify="right")
    for where, value in zip(sites, section["rates"], strict=True):
        shown.add_row(where, f"{value:.4g}")
    type(console)(highlight=False).print(shown)
    typer.echo(f"{'found' if finished else 'best so far, the search had not ended'} after {len(result.history)} rounds")
    typer.echo(f"saved to {target}; use them with: fedtail run --rates {target}")


def _search(path: str | None, overrides: list[str]) -> str | None:
    """FedHOO, unless the config names a strategy that searches (or an override names any)."""
    if any(item.partition("=")[0].strip() == "rates.name" for item in overrides):
        return None
    return "fedhoo" if path is None or load_config(path).rates.name in ("uniform", "fixed", "schedule") else None
