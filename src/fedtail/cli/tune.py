"""``fedtail tune``: the rate search alone, or all settings within a time budget."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

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
from fedtail.cli.progress import RoundProgress, console
from fedtail.cli.tables import print_block
from fedtail.core.metrics import METRICS
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.rates.base import fixed_section
from fedtail.report.blocks import Table
from fedtail.runs.config import changed, load_config, parse_overrides, read_config
from fedtail.runs.execution import run
from fedtail.settings import flatten
from fedtail.study.tuning import RUNGS, Trial, parse_budget, tune_settings
from fedtail.words import duration, plural

SHOWN = 5
"""Trials in the closing table."""


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
            raise FedtailError("--resume continues a rate search; --budget starts from scratch; leave out one of them")
        _check_file(save or Path("tuned.toml"), (".toml",), given=save is not None)
        answer = _within(budget, arguments, flags, save or Path("tuned.toml"), quiet=quiet, silent=as_json)
    else:
        if save is not None:  # known before the search, not after it
            _check_file(save, (".toml", ".json"), given=True)
        answer = _rates(arguments, flags, save, resume=resume, quiet=quiet, silent=as_json)
    if as_json:
        typer.echo(json.dumps(answer))


def _check_file(path: Path, suffixes: Sequence[str], *, given: bool) -> None:
    if path.suffix not in suffixes:
        raise FedtailError(f"--save {str(path)!r} must end in {' or '.join(suffixes)}")
    if path.exists() and not given:
        raise FedtailError(f"{str(path)!r} already exists; choose another file with --save, or remove it")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def _rates(
    arguments: list[str] | None, flags: dict[str, Any], save: Path | None, *, resume: bool, quiet: bool, silent: bool
) -> dict[str, Any]:
    """Search rates, write them beside the run and where asked, and return what was found."""
    if "rates.name" not in flags:
        flags |= rate_flags(_search(*split_arguments(arguments)))
    config = run_config(arguments, flags, resume=resume)
    title = f"tune {config.rates.name}"
    with RoundProgress(title, config.run.rounds, "fedtail tune", resume=resume, quiet=quiet) as shown:
        result = run(
            config, resume=resume, search_only=True, on_round=shown, on_start=shown.start, on_encode=shown.encoded
        )
    folder, last = result.folder or Path(), result.history[-1]
    section, n = fixed_section(last), len(result.history)
    target = save or folder / "rates.toml"
    for file in dict.fromkeys((folder / "rates.toml", target)):  # a search is too dear to be lost with a bad path
        text = tomli_w.dumps({"rates": section}) if file.suffix == ".toml" else json.dumps({"rates": section}, indent=1)
        with writing(file):
            write_atomically(file, text)
    sites = list(result.about.sites)
    if not silent:
        rows = [[site, f"{value:.4g}"] for site, value in zip(sites, section["rates"], strict=True)]
        print_block(Table(rows, ["Client", section.get("searches", "rate")]), most=len(rows))
        state = "best so far (the search has not finished)" if last["searching"] else "found"
        typer.echo(f"{state} after {plural(n, 'round')}")
        typer.echo(f"saved to {target}; use them with: fedtail run --rates {target}")
    answer = {"run": str(folder), "file": str(target), "rounds": n, "finished": not last["searching"]}
    return {**answer, "sites": sites, **section}


def _search(path: str | None, overrides: list[str]) -> str | None:
    """FedHOO, unless the config names a strategy that searches (or an override names any)."""
    if any(item.partition("=")[0].strip() == "rates.name" for item in overrides):
        return None
    return "fedhoo" if path is None or load_config(path).rates.name in ("uniform", "fixed", "schedule") else None


def _within(
    budget: str, arguments: list[str] | None, flags: Mapping[str, Any], target: Path, *, quiet: bool, silent: bool
) -> dict[str, Any]:
    """Race method, learning rate, rate and weight decay for ``budget``, write the config that wins, and return it."""
    path, overrides = split_arguments(arguments)
    given = {*flags, *parse_overrides(overrides)}
    if path is not None and not Path(path).is_dir():  # a run folder says everything: there it is where to start from
        given |= set(flatten(read_config(Path(path))))
    settings = load_config(path, overrides, flags, suggest=True)
    judged = {"run.metric": "macro_f1", "run.select": "best"}
    settings = changed(settings, {key: value for key, value in judged.items() if key not in given})
    began, name = time.perf_counter(), METRICS[settings.run.metric].words

    def note(trial: Trial, left: float) -> None:
        if not quiet:
            rung = f"rung {trial.rung + 1}/{RUNGS}, {trial.rounds} rounds"
            score = f"validation {name} {_score(trial)}"
            console.print(f"tune  {rung}  {_words(trial)}: {score}  {max(left, 0):.0f} s left", soft_wrap=True)

    tuned, tuning = tune_settings(settings, given, parse_budget(budget), note)
    if not math.isfinite(tuning.best.score):
        raise FedtailError("every candidate diverged or did not fit the data; `fedtail run` shows why")
    with writing(target):
        write_atomically(target, changed(tuned, {"run.name": None}).to_toml())
    took, n = time.perf_counter() - began, len(tuning.trials)
    if not silent:
        ranked = sorted(tuning.trials, key=lambda t: (-t.rung, -t.score))
        rows = [[_words(trial), str(trial.rounds), _score(trial)] for trial in ranked]
        print_block(Table(rows[:SHOWN], ["Settings", "Rounds", f"Validation {name}"]))
        typer.echo(f"{n} trials with {tuning.candidates} candidates in {duration(took)}")
        typer.echo(f"saved to {target}; train with: fedtail run {target}")
    best = {"values": tuning.best.values, "validation": tuning.best.score, "rounds": tuning.best.rounds}
    return {
        "file": str(target), "best": best, "trials": n, "candidates": tuning.candidates, "seconds": round(took, 1)
    }  # fmt: skip


def _words(trial: Trial) -> str:
    """Return what a trial changes, as a person would say it."""
    values = dict(trial.values)
    names = [str(values.pop(key)) for key in list(values) if key.endswith(".name")]
    named = [f"{key.rpartition('.')[2].replace('_', ' ')} {value:g}" for key, value in values.items()]
    return ", ".join([*names, *named]) or "unchanged"


def _score(trial: Trial) -> str:
    return f"{trial.score:.4f}" if math.isfinite(trial.score) else "diverged"
