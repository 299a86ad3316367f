"""``fedtail run``: one config, one run folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtail.cli.options import ONE_RUN, Arguments, Json, Quiet, Resume, config_flags, run_config
from fedtail.cli.progress import RoundProgress, console, print_notes, terminal
from fedtail.cli.tables import print_block
from fedtail.core.metrics import shown
from fedtail.files import read_json
from fedtail.report import load_run, write_run_report
from fedtail.report.blocks import Table
from fedtail.report.comparison import comparisons
from fedtail.report.facts import found_and_missed, number_in
from fedtail.report.sections.classes import class_table
from fedtail.report.sections.sites import site_table, worst_in_words
from fedtail.report.watch import Watch
from fedtail.rounds.history import plain
from fedtail.runs.execution import run
from fedtail.runs.record import RunRecord, promises
from fedtail.words import fixed


@config_flags(*ONE_RUN)
def run_command(
    arguments: Arguments = None,
    *,
    flags: dict[str, Any],
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report on this machine while the run goes on; it updates itself.")
    ] = False,
) -> None:
    """Train one federation and write a run folder.

    `fedtail run` trains FedCGNM on long-tailed digits; `fedtail run configs/digits.toml method.beta=0.7` reads a file
    and changes one value; `fedtail run --method fedavg --rates 0.4` uses flags.
    """
    config = run_config(arguments, flags, resume=resume)
    with ExitStack() as stack:
        live = stack.enter_context(Watch()) if watch else None
        if live is not None:
            console.print(f"watch the run at {live.url}", soft_wrap=True)
        title = config.method.name
        progress = stack.enter_context(
            RoundProgress(title, config.run.rounds, "fedtail run", resume=resume, quiet=quiet)
        )

        def begin(folder: Path, done: int) -> None:
            progress.start(folder, done)
            if live is not None:
                live.folder = folder
            print_notes(read_json(folder / "clients.json")["notes"])

        result = run(
            config,
            resume=resume,
            on_round=progress,
            on_start=begin,
            on_encode=progress.encoded,
            on_progress=progress.inside,
        )
    folder = result.folder or Path()
    page = write_run_report(folder)
    if as_json:
        outcome = {**result.test, "rates": result.rates, "floor": result.floor, **result.summary}
        typer.echo(json.dumps(plain({"run": str(folder), **outcome})))
    else:
        print_outcome(load_run(folder))
        if result.verdict is not None:
            terminal().print(f"warning: {result.verdict.line(folder)}", style="yellow", soft_wrap=True)
        typer.echo(f"run folder {folder}; open {page} in a browser")


NARROW = 60
"""Columns of the terminal below which classes and sites are left to the report."""
CLASS = ("Class", "Training", "Found", "Missed", "False alarms", "Precision", "Recall", "PR-AUC")


def print_outcome(run: RunRecord) -> None:
    """Print the metrics beside those of always answering the majority class, then what is found of each class, rarest
    first, and every site."""
    floor = run.result.get("floor") or {}
    rows = [[m.title, fixed(run.metric(m.name), 4), fixed(number_in(floor, m.name), 4)] for m in shown(run.test)]
    print_block(Table(rows, ["Test", "Model", "Majority only"]))
    (comparison,) = comparisons([run])
    if run.per_class("support").size and terminal().width >= NARROW:
        print_block(class_table(comparison, run), CLASS, of="classes, rarest first")
    sites = site_table(run)
    if len(sites.rows) > 1 and terminal().width >= NARROW:
        print_block(sites, of="sites, worst first")
        terminal().print(worst_in_words(comparison.reference), soft_wrap=True)
    wanted = (run.result.get("decision") or {}).get("find")
    counts = enumerate(found_and_missed(run, len(run.classes)))
    sentences = [str(count) for i, count in counts if not i or run.classes[count.place] == wanted]
    for sentence in (*sentences, *promises(run)):
        terminal().print(sentence, soft_wrap=True)
