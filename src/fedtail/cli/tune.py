"""``fedtail tune``: the rate search alone, or all settings within a time budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

from fedtail.cli.budget import tune_within
from fedtail.cli.options import (
    ONE_RUN,
    Arguments,
    Json,
    Quiet,
    Resume,
    config_flags,
    rate_flags,
    run_config,
    split_arguments,
)
from fedtail.cli.progress import RoundProgress, terminal
from fedtail.cli.tables import bare_table
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.rates.fixed import fixed_section
from fedtail.runs.config import load_config
from fedtail.runs.execution import run


@config_flags(
    *ONE_RUN,
    rates="Search: fedhoo (default), fedhoo_clusters, hoo, fast, locally_optimal, grid.",
    rounds="Maximum number of rounds (run.rounds).",
)
def tune(
    arguments: Arguments = None,
    *,
    flags: dict[str, Any],
    save: Annotated[
        Path | None,
        typer.Option(
            help="Additional file for the rates, .toml or .json, besides rates.toml in the run folder; with --budget, "
            "the config file (default: tuned.toml)."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help=(
                "Race methods, learning rates, rates and weight decay for this long (90s, 5m, 1h), then write a config."
            ),
        ),
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for resampling rates, or tune all settings within a time budget, and save the result.

    `fedtail tune --table t.csv --label y --budget 5m` races methods, learning rates, rates and weight decay on private
    validation splits, leaves what you set yourself unchanged, and writes tuned.toml for `fedtail run tuned.toml`.

    `fedtail tune --save rates.toml`, then `fedtail run --rates rates.toml` trains with the rates it found. To
    search another scalar of the local step, use `rates.searches=lr rates.low=0.01 rates.high=0.4 rates.log=true`.
    """
    if budget is not None:
        if resume:
            raise FedtailError(
                "--resume continues a rate search, but --budget always starts from scratch; leave out one of them"
            )
        tune_within(budget, arguments, flags, save, as_json=as_json, quiet=quiet)
        return
    if save is not None and save.suffix not in (".toml", ".json"):
        raise FedtailError(f"--save {str(save)!r} must end in .toml or .json")
    if save is not None:
        with writing(save):  # known before the search, not after it
            save.parent.mkdir(parents=True, exist_ok=True)
    if "rates.name" not in flags:
        flags |= rate_flags(_search(*split_arguments(arguments)))
    config = run_config(arguments, flags, resume=resume)
    title = f"tune {config.rates.name}"
    with RoundProgress(title, config.run.rounds, "fedtail tune", resume=resume, quiet=quiet) as progress:
        result = run(
            config,
            resume=resume,
            search_only=True,
            on_round=progress,
            on_start=progress.start,
            on_encode=progress.encoded,
        )
    folder, last = result.folder or Path(), result.history[-1]
    section = fixed_section(last)
    target = save or folder / "rates.toml"
    for file in dict.fromkeys((folder / "rates.toml", target)):  # a search is too dear to be lost with a bad path
        text = tomli_w.dumps({"rates": section}) if file.suffix == ".toml" else json.dumps({"rates": section}, indent=1)
        with writing(file):
            write_atomically(file, text)
    sites = json.loads((folder / "clients.json").read_text())["sites"]
    finished = not last["searching"]
    if as_json:
        found = {"run": str(folder), "file": str(target), "rounds": len(result.history), "finished": finished}
        typer.echo(json.dumps({**found, "sites": sites, **section}))
        return
    shown = bare_table("client")
    shown.add_column(section.get("searches", "rate"), justify="right")
    for where, value in zip(sites, section["rates"], strict=True):
        shown.add_row(where, f"{value:.4g}")
    terminal().print(shown)
    typer.echo(
        f"{'found' if finished else 'best so far (the search has not finished)'} after {len(result.history)} rounds"
    )
    typer.echo(f"saved to {target}; use them with: fedtail run --rates {target}")


def _search(path: str | None, overrides: list[str]) -> str | None:
    """FedHOO, unless the config names a strategy that searches (or an override names any)."""
    if any(item.partition("=")[0].strip() == "rates.name" for item in overrides):
        return None
    return "fedhoo" if path is None or load_config(path).rates.name in ("uniform", "fixed", "schedule") else None
