"""``local.lr = "auto"`` against every learning rate of a grid: test macro F1 and the time of a run.

    FEDTAIL_DATA=DIR python benchmarks/auto_lr.py [digits blobs adult unsw] [--method fedcgnm] [--seed 0]

Every run selects by validation macro F1 (``run.select = best``), as the defaults for own data do, and runs all its
rounds. Time is this process's CPU time, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from fedtail.rates.race import LRS
from fedtail.runs.config import load_config
from fedtail.runs.execution import run

PROBLEMS = {
    "digits": ["data.name=digits"],
    "blobs": ["data.name=blobs"],
    "adult": ["data.name=adult", "data.clients=10"],
    "unsw": ["data.name=unsw", "model.name=mlp", "run.rounds=20"],
}
GRID = tuple(sorted(LRS["sgd"]))


def measure(overrides: list[str]) -> tuple[float, float, dict[str, float]]:
    """Test macro F1, CPU seconds and what a race found."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        result = run(load_config(None, [*overrides, f"run.folder={folder}"]))
        return float(result.test["macro_f1"]), time.process_time() - began, result.summary.get("found", {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), help=" ".join(PROBLEMS))
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    shared = ["run.select=best", "run.metric=macro_f1", f"method.name={asked.method}", f"run.seed={asked.seed}"]
    columns = [f"{lr:g}" for lr in GRID]
    print(f"{'':8}" + "".join(f"{c:>8}" for c in columns) + f"{'auto':>8}{'- best':>8}{'time x':>8}  found", flush=True)
    for name in asked.problems:
        measure([*PROBLEMS[name], *shared, "run.rounds=1"])  # data are read and steps captured once
        fixed = [measure([*PROBLEMS[name], *shared, f"local.lr={lr}"]) for lr in GRID]
        score, seconds, found = measure([*PROBLEMS[name], *shared, "local.lr=auto"])
        best, mean = max(f[0] for f in fixed), sum(f[1] for f in fixed) / len(fixed)
        row = "".join(f"{f[0]:8.3f}" for f in fixed)
        print(f"{name:8}{row}{score:8.3f}{score - best:8.3f}{seconds / mean:8.2f}  {found}", flush=True)


if __name__ == "__main__":
    main()
