"""``fedtail compare``: several methods on one problem, ranked."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtail.cli.cells import run_with_progress
from fedtail.cli.options import SOURCE, Fresh, Json, Workers, config_flags, split_arguments
from fedtail.cli.progress import console
from fedtail.cli.tables import print_table
from fedtail.core.metrics import no_background
from fedtail.errors import FedtailError, one_of
from fedtail.report import load_run, write_report
from fedtail.report.comparison import Comparison, comparisons
from fedtail.report.tables import TESTED, headline, to_csv, to_markdown
from fedtail.report.tables import Table as Ranking
from fedtail.rounds.checkpoint import write_atomically
from fedtail.rounds.history import plain
from fedtail.runs.execution import build_federation
from fedtail.study.cells import Outcome, finished
from fedtail.study.compare import (
    DIGITS_LRS,
    best_rates,
    chosen_methods,
    comparison_cells,
    method_configs,
    own_problem,
)


@config_flags(*SOURCE, "data_dir", "clients", "rates", "model", "rounds", "device")
def compare_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A TOML file, then overrides: section.key=value, or method.key=value with a method's own name.",
        ),
    ] = None,
    *,
    methods: Annotated[str, typer.Option(help="`all`, or names separated by commas (see `fedtail methods`).")] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per method, from run.seed on.")] = 3,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to try, e.g. 0.4,0.1; each method keeps its best by validation. By default local.lr, "
            "and 0.4,0.1 on the built-in comparison."
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help=f"Ranked (and learning rates chosen) by: {', '.join(TESTED)}.")
    ] = "macro_f1",
    flags: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder for the runs, the tables and report.html.")] = Path("runs/compare"),
    workers: Workers = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Compare methods on one problem over several seeds and print the ranking.

    Without a config it is the demo's comparison: digits with imbalance 20 over 5 clients. Finished runs are kept, so
    an interrupted comparison goes on where it stopped. `fedtail compare --methods fedprox,fedcgnm fedprox.mu=0.1`.
    """
    if metric not in TESTED:
        raise one_of("--metric", metric, TESTED)
    began = time.perf_counter()
    path, overrides = split_arguments(arguments)
    configs = method_configs(chosen_methods(methods), path, overrides, flags)
    tried = learning_rates(lrs)
    if not tried and not own_problem(path, overrides, flags) and not any(o.startswith("local.lr=") for o in overrides):
        tried = list(DIGITS_LRS)
    cells = comparison_cells(configs, seeds, tried)
    own = own_problem(path, overrides, flags) and not all(finished(cell.folder(out)) for cell in cells)
    if own or metric == "defect_score":  # bad data is one line before the first run, not one per run
        federation = build_federation(cells[0].config)
        if metric == "defect_score" and federation.background is None:
            raise no_background("--metric defect_score")
    pool = workers or min(4, os.cpu_count() or 1)
    outcomes = run_with_progress("compare", cells, out, workers=pool, fresh=fresh, strict=False)
    kept = best_rates(outcomes, metric) if tried else outcomes
    failed = [o for o in kept if o.error]
    runs = [load_run(o.folder) for o in kept if not o.error]
    if not runs:
        raise FedtailError(f"every run failed; first {failed[0].cell.label}: {failed[0].error}")
    found = comparisons(runs)
    rankings = [ranked(headline(comparison, metric)) for comparison in found]
    write_report(runs, out / "report.html", "fedtail compare")
    picked = {o.cell.config.method.name: o.cell.config.local.lr for o in kept}
    answer = write_tables(out, rankings, found, failed, picked)
    if as_json:
        typer.echo(json.dumps(plain(answer)))
    else:
        for ranking in rankings:
            print_table(ranking)
        if tried:
            said = ", ".join(f"{name} {lr:g}" for name, lr in picked.items())
            typer.echo(f"learning rates, chosen on validation splits: {said}")
        typer.echo(f"{len(cells)} runs in {time.perf_counter() - began:.0f} s; tables and report.html are in {out}")
    for o in failed:
        console.print(f"failed: {o.cell.label}: {o.error}", style="red", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def learning_rates(text: str | None) -> list[float]:
    """``0.4,0.1`` as numbers."""
    try:
        values = [float(v) for v in (text or "").split(",") if v.strip()]
    except ValueError:
        values = [math.nan]
    if not all(v > 0 and math.isfinite(v) for v in values):
        raise FedtailError(f"--lrs {text!r} is not a list of positive numbers; use e.g. --lrs 0.4,0.2,0.1")
    return values


def ranked(table: Ranking) -> Ranking:
    """Best first, by the metric that is tested; undefined last."""
    column = table.columns.index(table.metric)

    def key(cells: Sequence[tuple[float, float]]) -> float:
        mean = cells[column][0]
        return -mean if math.isfinite(mean) else math.inf

    return replace(table, rows=tuple(sorted(table.rows, key=lambda row: key(row.cells))))


def write_tables(
    out: Path,
    tables: Sequence[Ranking],
    found: Sequence[Comparison],
    failed: Sequence[Outcome],
    lrs: Mapping[str, float],
) -> dict[str, Any]:
    """``comparison.md``, ``comparison.csv`` (one line per run) and ``comparison.json``, which is returned."""
    answer = {
        "folder": str(out),
        "problems": [
            {
                "title": table.title,
                "metric": table.metric,
                "baseline": table.baseline,
                "floor": table.floor,
                "ranking": [
                    {
                        "method": row.label,
                        "seeds": row.seeds,
                        "mean": {c: cell[0] for c, cell in zip(table.columns, row.cells, strict=True)},
                        "spread": {c: cell[1] for c, cell in zip(table.columns, row.cells, strict=True)},
                        "difference": row.versus.difference if row.versus else None,
                        "p": row.p_holm if row.versus else None,
                        "p_sign_flip": row.versus.p_sign_flip if row.versus else None,
                    }
                    for row in table.rows
                ],
            }
            for table in tables
        ],
        "learning_rates": dict(lrs),
        "failed": [{"run": o.cell.label, "error": o.error} for o in failed],
    }
    write_atomically(out / "comparison.md", to_markdown(tables))
    write_atomically(out / "comparison.csv", to_csv(found))
    write_atomically(out / "comparison.json", json.dumps(plain(answer), indent=1))
    return answer
