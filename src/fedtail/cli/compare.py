"""``fedtail compare``: several methods on one problem, ranked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import SOURCE, TRAINING, Fresh, Json, Workers, config_flags, split_arguments
from fedtail.cli.progress import Encoded, console
from fedtail.cli.tables import print_table
from fedtail.errors import FedtailError, one_of
from fedtail.registry import is_own
from fedtail.report import load_run, write_report
from fedtail.report.comparison import comparisons
from fedtail.report.sections.yardsticks import verdict_of_federating
from fedtail.report.tables import headline, tested, write_rankings
from fedtail.settings import Settings
from fedtail.study.compare import (
    best_by_validation,
    best_lrs,
    brings_data,
    check_data,
    chosen_methods,
    comparison_cells,
    default_lrs,
    method_configs,
)
from fedtail.study.yardsticks import measure_yardsticks


@config_flags(*SOURCE, "data_dir", "clients", *TRAINING, "device")
def compare_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A TOML file, then overrides: section.key=value, or e.g. fedprox.mu=0.1 for one method.",
        ),
    ] = None,
    *,
    methods: Annotated[
        str,
        typer.Option(
            help="`all`, or comma-separated names (see `fedtail methods`); `fedcgnm+fedhoo` sets a rate strategy too."
        ),
    ] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per method, starting at run.seed.")] = 3,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to try, e.g. 0.4,0.1; each method keeps the best on validation. Default: local.lr, "
            "or 0.4,0.1 on the built-in problem."
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help=f"Metric for ranking and for choosing learning rates: {', '.join(tested())}.")
    ] = "macro_f1",
    flags: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder for the runs, the tables and report.html.")] = Path("runs/compare"),
    yardsticks: Annotated[
        bool,
        typer.Option(
            "--yardsticks",
            help="Also train each site alone and on the pooled data, plus gradient boosting and logistic regression "
            "for tables, to show what federating gains and what not pooling the data costs.",
        ),
    ] = False,
    workers: Workers = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Compare methods on one problem over several seeds and print the ranking.

    Without a config or data of your own it uses digits with imbalance 20 and 5 clients. Finished runs are kept, so
    an interrupted comparison continues where it stopped.
    Example: `fedtail compare --methods fedprox,fedcgnm fedprox.mu=0.1`.
    """
    if not is_own(metric) and metric not in tested():
        raise one_of("--metric", metric, tested())
    began = time.perf_counter()
    path, overrides = split_arguments(arguments)
    configs = method_configs(chosen_methods(methods), path, overrides, flags)
    tried = learning_rates(lrs) or default_lrs(path, overrides, flags)
    cells = comparison_cells(configs, seeds, tried)
    check_data(cells, out, metric, own=brings_data(path, overrides, flags), progress=Encoded())
    outcomes = run_with_progress("compare", cells, out, workers=workers, fresh=fresh, strict=False)
    kept = best_lrs(outcomes, metric) if tried else outcomes
    failed = [o for o in kept if o.error]
    if len(failed) == len(kept):
        raise FedtailError(f"every run failed; the first was {failed[0].cell.label}: {failed[0].error}")
    runs = [load_run(o.folder) for o in kept if not o.error]
    for o in best_by_validation(kept, metric) if yardsticks else ():
        for yardstick in measure_yardsticks(o.cell.config, load_run(o.folder), out):
            console.print(f"yardstick  {yardstick}", style="dim", soft_wrap=True)
    compared = comparisons(runs)
    rankings = [headline(comparison, metric, ranked=True) for comparison in compared]
    federating = [verdict_of_federating(comparison, metric) for comparison in compared]
    write_report(runs, out / "report.html", "fedtail compare")
    answer = write_rankings(
        out,
        rankings,
        learning_rates={pair_name(o.cell.config, configs): o.cell.config.local.lr for o in kept if not o.error},
        federating=[sentences or None for sentences in federating],
        failed=[{"run": o.cell.label, "error": o.error} for o in failed],
    )
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        for table, sentences in zip(rankings, federating, strict=True):
            if sentences:
                typer.echo(sentences)
            print_table(table)
        if tried:
            chosen = ", ".join(f"{name} {lr:g}" for name, lr in answer["learning_rates"].items())
            typer.echo(f"learning rates chosen on validation splits: {chosen}")
        typer.echo(f"{len(cells)} runs in {time.perf_counter() - began:.0f} s; tables and report.html are in {out}")
    for o in failed:
        console.print(f"failed: {o.cell.label}: {o.error}", style="red", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def pair_name(config: Settings, configs: Mapping[str, Settings]) -> str:
    """What ``--methods`` called a config."""
    pair = f"{config.method.name}+{config.rates.name}"
    return pair if pair in configs else config.method.name


def learning_rates(text: str | None) -> list[float]:
    """``0.4,0.1`` as numbers."""
    try:
        values = [float(v) for v in (text or "").split(",") if v.strip()]
    except ValueError:
        values = [math.nan]
    if not all(v > 0 and math.isfinite(v) for v in values):
        raise FedtailError(f"--lrs {text!r} is not a list of positive numbers; use e.g. --lrs 0.4,0.2,0.1")
    return values
