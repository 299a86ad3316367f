"""Which round of a run to keep by private validation: rules compared by the test metrics of the round that they keep.

    FEDTAIL_DATA=DIR python benchmarks/selection.py adult-10 unsw injuries --seeds 0,1,2 [--rates 0.6] [--rounds 50]
    python benchmarks/selection.py --means FILE...      the table of what --keep FILE has kept

Every run goes through all its rounds once; a rule then sees the validation of one round after the other, and stops
where ``run.patience`` would. In place of each global model a rule may look at an average: the mean of the last five or
ten, or an exponential one that keeps .8 of itself in a round. ``either`` keeps by its rule a single model and a mean of
ten, and of the two the one that validation likes better.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail import fit, partition
from fedtail.core.metrics import summarize
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import Split, confusion_on, federation_split
from table_models import as_table

WINDOWS = {"mean of five": 5, "mean of ten": 10}
DECAY = 0.8
PATIENCE = 15
RULES = {"last": 0.0, "best": 0.0, "half, of accuracy": 0.5, "half": 0.5, "one": 1.0}
"""Name -> standard errors that a later round may be behind the best one."""


def history(name: str, seed: int, rate: str, rounds: int, method: str) -> dict[str, Any]:
    """Validation and test metrics of the global model, and of the mean of the last ones, after every round."""
    pooled = as_table(name, seed, None)
    sites = partition(pooled, clients=10, alpha=0.5, seed=seed) if pooled.sites is None else partition(pooled)
    sites = replace(sites, own="table")
    models: list[torch.Tensor] = []
    strategy = "auto" if rate == "auto" else float(rate)
    result = fit(
        sites, None, method, strategy, seed=seed, rounds=rounds, patience=0, evaluate_every=rounds, diagnostics=(),
        on_round=lambda state, record, took: models.append(state.x.clone()) or None,
    )  # fmt: skip
    splits = Split.of(sites, np.concatenate(sites.validation)), federation_split(sites, "test")
    flat = FlatModel(result.module)
    passes = [confusion_on(flat, split) for split in splits]

    def judged(x: torch.Tensor) -> dict[str, Any]:
        validation, test = (summarize(one(x), sites.label_map().sum(0), sites.background) for one in passes)
        told = {"validation": validation["macro_f1"], "f1": validation["per_class_f1"]}
        return {**told, "test": test["macro_f1"], "tail": test["tail"]}

    found = {kind: [judged(x) for x in each] for kind, each in averages(models).items()}
    counts = np.bincount(splits[0].labels, minlength=sites.n_classes).tolist()
    searched = sum(bool(record["searching"]) for record in result.history)
    about = {
        "data": name,
        "seed": seed,
        "rate": rate,
        "method": method,
        "rounds": rounds,
        "counts": counts,
        "searched": searched,
    }
    return {**about, "models": found}


def averages(models: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Kind -> what a server would have beside the global model after each round."""
    rounds, kinds = range(len(models)), {"single": models}
    for kind, n in WINDOWS.items():
        kinds[kind] = [torch.stack(models[max(0, t + 1 - n) : t + 1]).mean(0) for t in rounds]
    kinds["exponential"] = models[:1]
    for x in models[1:]:
        kinds["exponential"].append(DECAY * kinds["exponential"][-1] + (1 - DECAY) * x)
    return kinds


def kept(rows: list[dict[str, Any]], counts: list[int], searched: int, rule: str, patience: int) -> dict[str, Any]:
    """The round that a rule keeps."""
    if rule == "last":
        return rows[-1]
    best, chosen, since, slack = -np.inf, rows[0], 0, 0.0
    for t, row in enumerate(rows):
        score = row["validation"]
        if score > best:
            best, chosen, since = score, row, t
            there = np.array(counts) > 0
            f1, n = np.array(row["f1"])[there], np.array(counts)[there]
            error = np.sqrt((f1 * (1 - f1) / n).sum()) / len(n)
            slack = RULES[rule] * (np.sqrt(score * (1 - score) / sum(counts)) if "accuracy" in rule else error)
        elif score >= best - slack:
            chosen = row
        if patience and t - max(since, searched) >= patience:
            break
    return chosen


def means(runs: Iterable[dict[str, Any]]) -> str:
    """Mean test macro F1 and tail recall over seeds, by data set and rule."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        found[run["data"], f"{run['method']}, rate {run['rate']}, {run['rounds']} rounds"].append(run)
    kinds = ("single", *WINDOWS, "exponential", "either")
    rules = [(kind, rule, p) for kind in kinds for rule in RULES for p in (0, PATIENCE)]
    lines = ["| keeps | stops | " + " | ".join(f"{n}, {s} ({len(r)})" for (n, s), r in found.items()) + " | mean |"]
    lines.append("|---|---|" + "---|" * (len(found) + 1))
    for kind, rule, patience in rules:
        cells = []
        for each in found.values():
            rows = []
            for r in each:
                of = ("single", "mean of ten") if kind == "either" else (kind,)
                some = [kept(r["models"][k], r["counts"], r["searched"], rule, patience) for k in of]
                rows.append(max(some, key=lambda row: float(row["validation"])))
            cells.append([float(np.mean([r[k] for r in rows])) for k in ("test", "tail")])
        shown = " | ".join(f"{f:.3f} {t:.2f}" for f, t in [*cells, np.mean(cells, axis=0)])
        lines.append(f"| {rule}, {kind} | {patience or 'never'} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=["adult-10", "unsw"])
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rates", default="0.6")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--keep", type=Path, help="file to add a line of JSON to for every run")
    parser.add_argument("--means", nargs="+", type=Path, help="files that --keep has written; nothing is run")
    asked = parser.parse_args()
    runs = [json.loads(line) for path in asked.means or [] for line in path.read_text().splitlines()]
    for name in [] if asked.means else asked.data:
        for seed, rate in ((int(s), r) for s in asked.seeds.split(",") for r in asked.rates.split(",")):
            runs.append(history(name, seed, rate, asked.rounds, asked.method))
            if asked.keep is not None:
                with asked.keep.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    print(means(runs))


if __name__ == "__main__":
    main()
