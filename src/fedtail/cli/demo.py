"""``fedtail demo``: the first thing to run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import Fresh, Workers
from fedtail.cli.tables import print_table
from fedtail.report import load_run, write_report
from fedtail.report.comparison import comparisons
from fedtail.report.tables import headline
from fedtail.study.compare import comparison_cells, method_configs

METHODS = ("fedavg", "fedcgn", "fedcgnm")
"""Compared on the built-in problem, at one learning rate."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and report.html.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per method.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per run.")] = 40,
    workers: Workers = None,
    fresh: Fresh = False,
) -> None:
    """FedAvg, FedCGN and FedCGNM on long-tailed digits with 5 clients: prints a table and writes a report."""
    began = time.perf_counter()
    cells = comparison_cells(method_configs(METHODS, flags={"run.rounds": rounds}), seeds)
    outcomes = run_with_progress("demo", cells, out, workers=workers, fresh=fresh)
    runs = [load_run(outcome.folder) for outcome in outcomes]
    page = write_report(runs, out / "report.html", "fedtail demo: digits with a long tail, 5 clients")
    typer.echo()
    for comparison in comparisons(runs):
        print_table(headline(comparison))
    typer.echo(f"\n{len(cells)} runs in {time.perf_counter() - began:.0f} s; open {page} in a browser")
