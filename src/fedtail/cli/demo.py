"""``fedtail demo``: the first thing to run."""

from __future__ import annotations

import os
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
from fedtail.runs.config import check_config
from fedtail.study.cells import Cell, seeds_of

METHODS = ("fedavg", "fedcgn", "fedcgnm")


def demo_cells(seeds: int, rounds: int) -> list[Cell]:
    """Digits with imbalance 20 over 5 clients, Dirichlet 0.5; one learning rate for all methods."""
    cells = []
    for method in METHODS:
        config = check_config(
            {
                "data": {"name": "digits", "imbalance": 20.0, "clients": 5, "partition": "dirichlet", "alpha": 0.5},
                "method": {"name": method},
                "rates": {"name": "uniform", "rate": 0.6},
                "local": {"lr": 0.4, "batch_size": 32},
                "run": {"rounds": rounds},
            }
        )
        cells += seeds_of(config, f"digits-{method}", range(seeds))
    return cells


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and report.html.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per method.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per run.")] = 40,
    workers: Workers = None,
    fresh: Fresh = False,
) -> None:
    """FedAvg, FedCGN and FedCGNM on long-tailed digits over 5 clients: a table and a report to look at."""
    began = time.perf_counter()
    cells = demo_cells(seeds, rounds)
    outcomes = run_with_progress("demo", cells, out, workers=workers or min(4, os.cpu_count() or 1), fresh=fresh)
    runs = [load_run(outcome.folder) for outcome in outcomes]
    page = write_report(runs, out / "report.html", "fedtail demo: digits with a long tail, 5 clients")
    typer.echo()
    for comparison in comparisons(runs):
        print_table(headline(comparison))
    typer.echo(f"\n{len(cells)} runs in {time.perf_counter() - began:.0f} s; open {page} in a browser")
