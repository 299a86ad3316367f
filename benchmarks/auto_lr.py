"""``local.lr = "auto"`` against every learning rate of a grid: test macro F1 and the time of a run.

    FEDTAIL_DATA=DIR python benchmarks/auto_lr.py [digits blobs adult unsw] [--method fedcgnm] [--seeds 0,1,2]
    FEDTAIL_DATA=DIR python benchmarks/auto_lr.py strikes loans --seeds 0,1     own tables with their defaults
    python benchmarks/auto_lr.py --means FILE...       the table of what --keep FILE has kept

Every run selects by validation macro F1 (``run.select = best``), as the defaults for own data do, and runs all its
rounds. The best of the grid is the learning rate with the best mean over seeds: the best of each seed is partly luck.
Time is this process's CPU time, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail import fit, partition
from fedtail.rounds.race import LRS
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from table_models import as_table

PROBLEMS = {
    "digits": ["data.name=digits"],
    "blobs": ["data.name=blobs"],
    "adult": ["data.name=adult", "data.clients=10"],
    "unsw": ["data.name=unsw", "model.name=mlp", "run.rounds=20"],
}
"""Settings by name; any other name is one of ``benchmarks/table_models.py``, with the defaults for a user's table."""
GRID = tuple(sorted(LRS["sgd"]))
TABLE_ROUNDS = 30
Outcome = tuple[float, float, dict[str, float]]
"""Test macro F1, CPU seconds and what a race found."""


def measure(overrides: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        result = run(load_config(None, [*overrides, f"run.folder={folder}"]))
        return float(result.test["macro_f1"]), time.process_time() - began, result.summary.get("found", {})


def table_runs(name: str, seed: int, method: str) -> Callable[[float | str, int], Outcome]:
    pooled = as_table(name, seed, None)
    sites = partition(pooled, clients=10, alpha=0.5, seed=seed) if pooled.sites is None else partition(pooled)
    sites = replace(sites, own="table")

    def measured(lr: float | str, rounds: int) -> Outcome:
        began = time.process_time()
        result = fit(sites, None, method, 0.6, seed=seed, lr=lr, rounds=rounds, patience=0, diagnostics=())
        return float(result.test["macro_f1"]), time.process_time() - began, result.summary.get("found", {})

    return measured


def play(name: str, seed: int, method: str, more: list[str]) -> dict[str, Any]:
    """Every learning rate of the grid, and the race, on one seed."""
    if name in PROBLEMS:
        chosen = ["run.select=best", "run.metric=macro_f1", f"method.name={method}", f"run.seed={seed}", *more]
        shared = [*PROBLEMS[name], *chosen]
        measure([*shared, "local.lr=0.1", "run.rounds=1"])  # data are read and steps captured once
        fixed = [measure([*shared, f"local.lr={lr}"]) for lr in GRID]
        score, seconds, found = measure([*shared, "local.lr=auto"])
    else:
        measured = table_runs(name, seed, method)
        measured(0.1, 1)
        fixed = [measured(lr, TABLE_ROUNDS) for lr in GRID]
        score, seconds, found = measured("auto", TABLE_ROUNDS)
    slow = seconds / float(np.mean([f[1] for f in fixed]))
    return {"data": name, "seed": seed, "grid": [f[0] for f in fixed], "auto": score, "time": slow, "found": found}


def means(rows: Iterable[dict[str, Any]]) -> str:
    """Means over seeds; what auto is away from the best of the grid with the standard error of that difference."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["data"]].append(row)
    columns = [f"{lr:g}" for lr in GRID]
    lines = [f"{'':8}" + "".join(f"{c:>8}" for c in columns) + f"{'auto':>8}{'- best':>17}{'time x':>8}  found"]
    for name, each in found.items():
        grid, auto = np.array([r["grid"] for r in each]), np.array([r["auto"] for r in each])
        behind = auto - grid[:, grid.mean(0).argmax()]
        error = behind.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else 0.0
        lrs = ", ".join(f"{r['found'].get('lr', 0):g}" for r in each)
        row = "".join(f"{v:8.3f}" for v in grid.mean(0)) + f"{auto.mean():8.3f}{behind.mean():+8.3f} ± {error:.3f} "
        lines.append(f"{name:8}{row}{np.mean([r['time'] for r in each]):8.2f}  lr {lrs}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), help=f"{' '.join(PROBLEMS)}, or tables")
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--set", nargs="*", default=[], help="settings, e.g. method.delta=1; not for tables")
    parser.add_argument("--keep", type=Path, help="file to add a line of JSON to for every data set and seed")
    parser.add_argument("--means", nargs="+", type=Path, help="files that --keep has written; nothing is run")
    asked = parser.parse_args()
    rows = [json.loads(line) for path in asked.means or [] for line in path.read_text().splitlines()]
    for name, seed in ((n, int(s)) for n in asked.problems for s in asked.seeds.split(",") if not asked.means):
        rows.append(play(name, seed, asked.method, asked.set))
        print(rows[-1], flush=True)
        if asked.keep is not None:
            with asked.keep.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(means(rows))


if __name__ == "__main__":
    main()
