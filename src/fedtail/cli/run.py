"""``fedtail run``: one config, one run folder."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as RichTable

from fedtail.cli.options import ONE_RUN, Arguments, Json, Quiet, Resume, config_flags, ignored_clients, run_config
from fedtail.cli.outcome import print_classes, print_findings, print_sites
from fedtail.cli.progress import RoundProgress, console, terminal
from fedtail.cli.tables import bare_table
from fedtail.core.evidence import rarest, wilson
from fedtail.core.metrics import Metric, metrics, shown
from fedtail.report import load_run, write_run_report
from fedtail.report.watch import Watch
from fedtail.rounds.history import plain
from fedtail.runs.execution import run
from fedtail.runs.result import Result
from fedtail.words import fixed

DIGITS = 6
"""Characters of a metric's value."""
MOST_NAMED = 60
"""Characters of class names in the line below the table."""


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
            about = json.loads((folder / "clients.json").read_text())
            for note in [*about["notes"], *ignored_clients(flags, len(about["sites"]))]:
                console.print(f"note: {note}", style="dim", soft_wrap=True)

        result = run(
            config,
            resume=resume,
            on_round=progress,
            on_start=begin,
            on_encode=progress.encoded,
            on_progress=progress.inside,
        )
        if live is not None:
            live.finish()
    folder = result.folder or Path()
    page, record = write_run_report(folder), load_run(folder)
    if as_json:
        typer.echo(json.dumps(summary(result)))
    else:
        console_table(result)
        print_findings(record)
        print_classes(record)
        print_sites(record)
        if result.verdict is not None:
            terminal().print(f"warning: {result.verdict.line(folder)}", style="yellow", soft_wrap=True)
        typer.echo(f"run folder {folder}; open {page} in a browser")


def summary(result: Result) -> dict[str, Any]:
    """The machine-readable outcome: run folder, test metrics, rates, floor."""
    return dict(
        plain(
            {"run": str(result.folder), **result.test, "rates": result.rates, "floor": result.floor, **result.summary}
        )
    )


def console_table(result: Result) -> None:
    """The outcome as a small table on standard output, beside the floor of always answering the majority class."""
    has = [m for m in metrics() if m.name in result.test]
    defects = [m for m in has if m.needs == "background"]
    for columns in ([m for m in shown(result.test) if m not in defects], defects):
        if columns:
            terminal().print(_table(columns, result, terminal().width))
    if said := tail_support(result):
        terminal().print(said, style="dim", soft_wrap=True)


def tail_support(result: Result) -> str:
    """On how many test samples the tail accuracy rests, and how sure that makes it; empty where there is none."""
    tail, counts = result.test.get("tail", math.nan), result.about.train_counts
    if counts is None or result.about.test_counts is None or not math.isfinite(tail):
        return ""
    rare = rarest(counts)
    n = int(result.about.test_counts[rare].sum())
    low, high = wilson(tail, n)
    names = ", ".join(str(name) for name, of in zip(result.about.classes, rare, strict=True) if of)
    named = names if len(names) <= MOST_NAMED else f"{int(rare.sum())} classes"
    return f"tail: {named}; {n:,} test samples, 95 % interval {low:.3f} to {high:.3f}"


def _table(columns: list[Metric], result: Result, width: int) -> RichTable:
    table = bare_table()
    table.add_column("test", no_wrap=True)
    needed = len("majority only") + 3 + sum(max(DIGITS, *map(len, m.title.split())) + 3 for m in columns)
    model, floor = ([fixed(of.get(m.name), 4) for m in columns] for of in (result.test, result.floor))
    if width < needed:  # a row per metric
        table.add_column("model", justify="right")
        table.add_column("majority only", justify="right", style="dim")
        for row in zip((m.title for m in columns), model, floor, strict=True):
            table.add_row(*row)
    else:
        for m in columns:
            table.add_column(m.title, justify="right", min_width=max(DIGITS, *map(len, m.title.split())))
        table.add_row("model", *model)
        table.add_row("majority only", *floor, style="dim")
    return table
