"""``fedtail tune --budget``: settings that suit the data, within a time, as a config file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fedtail.cli.options import split_arguments
from fedtail.cli.progress import console, terminal
from fedtail.cli.tables import bare_table
from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.runs.config import changed, load_config, parse_overrides, read_config
from fedtail.settings import flatten
from fedtail.study.tuning import RUNGS, Trial, parse_budget, tune_settings

SHOWN = 5
"""Trials in the closing table."""


def tune_within(
    budget: str, arguments: list[str] | None, flags: Mapping[str, Any], save: Path | None, *, as_json: bool, quiet: bool
) -> None:
    """Race method, learning rate, rate and weight decay for ``budget``, and write a config that `fedtail run` takes."""
    seconds, target = parse_budget(budget), save or Path("tuned.toml")
    if target.suffix != ".toml":
        raise FedtailError(f"--save {str(target)!r} must end in .toml: --budget writes a config file")
    if target.exists() and save is None:
        raise FedtailError(f"{str(target)!r} already exists; choose another file with --save, or remove it")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    path, overrides = split_arguments(arguments)
    said = {*flags, *parse_overrides(overrides)}
    if path is not None and not Path(path).is_dir():  # a run folder says everything: there it is where to start from
        said |= set(flatten(read_config(Path(path))))
    settings = load_config(path, overrides, flags, suggest=True)
    judged = {"run.metric": "macro_f1", "run.select": "best"}
    settings = changed(settings, {key: value for key, value in judged.items() if key not in said})
    began, name = time.perf_counter(), METRICS[settings.run.metric].words

    def note(trial: Trial, left: float) -> None:
        if not quiet:
            rung = f"rung {trial.rung + 1}/{RUNGS}, {trial.rounds} rounds"
            shown = f"validation {name} {_score(trial)}"
            console.print(f"tune  {rung}  {words(trial)}: {shown}  {max(left, 0):.0f} s left", soft_wrap=True)

    found, tuning = tune_settings(settings, said, seconds, note)
    if not math.isfinite(tuning.best.score):
        raise FedtailError("every candidate diverged or did not fit the data; `fedtail run` shows why")
    with writing(target):
        write_atomically(target, changed(found, {"run.name": None}).to_toml())
    took = time.perf_counter() - began
    if as_json:
        best = {"values": tuning.best.values, "validation": tuning.best.score, "rounds": tuning.best.rounds}
        answer = {"file": str(target), "best": best, "trials": len(tuning.trials), "candidates": tuning.candidates}
        typer.echo(json.dumps({**answer, "seconds": round(took, 1)}))
        return
    table = bare_table("settings")
    for column in ("rounds", f"validation {name}"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in sorted(tuning.trials, key=lambda t: (-t.rung, -t.score))[:SHOWN]:
        table.add_row(words(trial), str(trial.rounds), _score(trial))
    terminal().print(table)
    typer.echo(f"{len(tuning.trials)} trials with {tuning.candidates} candidates in {took:.0f} s")
    typer.echo(f"saved to {target}; train with: fedtail run {target}")


def words(trial: Trial) -> str:
    """What a trial changes, as a person would say it."""
    said = [str(trial.values["method.name"])] if "method.name" in trial.values else []
    said += [
        f"{key.rpartition('.')[2].replace('_', ' ')} {value:g}"
        for key, value in trial.values.items()
        if not key.endswith(".name")
    ]
    return ", ".join(said) or "unchanged"


def _score(trial: Trial) -> str:
    return f"{trial.score:.4f}" if math.isfinite(trial.score) else "diverged"
