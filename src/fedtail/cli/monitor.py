"""``fedtail monitor`` and ``fedtail recalibrate``: the life of a model after training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.evaluate import Data, Label, Model, Site
from fedtail.cli.flags import Json
from fedtail.cli.options import AllowCode, RunFolder
from fedtail.cli.progress import console, print_notes, terminal
from fedtail.cli.tables import bare_table
from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError
from fedtail.files import read_toml
from fedtail.report.life import write_life_report
from fedtail.runs.judged import Judged, judge
from fedtail.runs.monitor import Seen, Watch
from fedtail.runs.recalibrate import keep, recalibrate
from fedtail.runs.saved import load_model
from fedtail.words import fixed, percent

Reference = Annotated[
    bool, typer.Option("--reference", help="Begin: labelled rows, not trained on, are what later ones compare to.")
]
LookName = Annotated[str, typer.Option(help="Name of this look, such as 2026-11; default: its number.")]
STATE = "monitor.json"
CHANGED = 3
"""Exit code where something has changed."""


def monitor(
    data: Data,
    model: Model,
    reference: Reference = False,
    state: Annotated[
        Path | None, typer.Option(help="File that remembers all looks; default: monitor.json in the run folder.")
    ] = None,
    name: LookName = "",
    label: Label = None,
    site: Site = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Look whether a trained model still fits new rows, with or without labels; made for a scheduler.

    Begin with `fedtail monitor held-out.csv --run runs/x --reference`, then look as often as you like with
    `fedtail monitor new.csv --run runs/x --name 2026-11`, and once again where its labels come later. Prints one line
    and draws a timeline beside the state; the exit code is 3 if something has changed, which without any change
    happens at most once in twenty lives of a model, however often you look.
    """
    judged = judge(model, data, label=label, site=site, allow_code=allow_code)
    path = state or (Path(model) / STATE if Path(model).is_dir() else Path(STATE))
    print_notes(judged.notes)
    if reference:
        begin(Watch.begin(judged), path)
        return
    if not path.is_file():
        raise FedtailError(
            f"there is no {str(path)!r}; begin with labelled rows that were not trained on and --reference"
        )
    look_at(Watch.load(path), judged, path, name, as_json)


def begin(watch: Watch, path: Path) -> None:
    """Write a life that begins, and say so."""
    watch.save(path)
    terminal().print(f"monitoring begins with {watch.reference.n:,} reference rows -> {path}", soft_wrap=True)


def look_at(watch: Watch, rows: Judged | Seen, path: Path, name: str, as_json: bool) -> None:
    """Take a look, write the life and its page, and print what has changed; the exit code says whether anything has."""
    look = watch.look(rows, name)
    watch.save(path)
    page = write_life_report(watch, path.with_suffix(".html"))
    terminal().print(look.sentence(), soft_wrap=True)
    console.print(f"timeline: {page}", style="dim", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(look.to_json()))
    if look.changed:
        raise typer.Exit(CHANGED)


def recalibrate_command(
    data: Data,
    run: RunFolder,
    label: Label = None,
    keep_it: Annotated[bool, typer.Option("--keep", help="Write the new decision into the run folder.")] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Refit a model's temperature, threshold or weights, and sets on new labelled rows; without labels its class mix.

    The weights stay. Example: `fedtail recalibrate march.csv --run runs/x --keep`.
    """
    model = load_model(run, allow_code=allow_code)
    judged = judge(model, data, label=label)
    path, config = run / STATE, run / "config.toml"
    goal = read_toml(config).get("decision", {}).get("goal", "") if config.is_file() else ""
    new = recalibrate(judged, Watch.load(path) if path.is_file() else None, goal)
    if new.before:
        table = bare_table("on these rows", "before", "after")
        for key, value in new.before.items():
            table.add_row(METRICS[key].title, fixed(value), fixed(new.after[key]))
        terminal().print(table)
    terminal().print("class mix: " + ", ".join(f"{name} {percent(share)}" for name, share in new.mix.items()))
    promise = new.decision.promise
    if promise is not None:
        terminal().print(promise.sentence(model.classes[new.decision.target or 0]), soft_wrap=True)
    if keep_it:
        terminal().print(f"the model has the new decision; the one before is in {keep(run, new)}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"before": new.before, "after": new.after, "mix": new.mix, "kept": keep_it}))
