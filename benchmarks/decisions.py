"""What calibration and thresholds give, site by site: `python benchmarks/decisions.py adult unsw flights`.

Every model is trained once per seed; all decisions are then chosen on private validation splits and judged on test rows
of the sites. Adult and UNSW are dealt over ten Dirichlet(0.5) sites with the class mix of each in its test rows; the
sites of flights are the carriers, tested on rows of the same ten months and on the two months after them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score

import fedtail as ft
from fedtail.core.evidence import wilson
from fedtail.core.scores import average_precision
from fedtail.core.significance import paired
from fedtail.data import Federation, partition, table_from_frame
from fedtail.data.sources import locate
from fedtail.data.tables.encode import encode_site, labelled
from fedtail.data.tables.read import Table
from fedtail.data.tables.schema import TableSchema
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rounds.evaluation import client_splits, model_logits, probabilities_of
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem
from fedtail.runs.build import assemble
from fedtail.runs.decide import choose_decisions
from fedtail.runs.split_scores import Splits, metrics_of_test, score_splits, worst_of
from fedtail.settings import DecisionSettings, Settings
from fedtail_experiments.data.flights import CATEGORIES, CLASSES, DESTINATIONS, NUMBERS, WEATHER, read_flights

ROUNDS = {"adult": 6, "unsw": 6, "flights": 2}
"""Fewer than a user would train: decisions come after, and ten seeds must fit."""
LEAST = 30
"""Validation samples of the class that 95 % are to be found of: the rarest class that has so many."""
DECISIONS: dict[str, dict[str, Any]] = {
    "temperature": {"calibrate": "temperature"},
    "vector": {"calibrate": "vector"},
    "vector, site": {"calibrate": "vector", "scope": "site"},
    "macro F1": {"calibrate": "temperature", "goal": "macro_f1"},
    "macro F1, site": {"calibrate": "temperature", "goal": "macro_f1", "scope": "site"},
    "balanced": {"calibrate": "vector", "goal": "balanced_accuracy"},
    "recall": {"goal": "recall", "recall": 0.95},
    "recall, site": {"goal": "recall", "recall": 0.95, "scope": "site"},
}


def federations(name: str, seed: int) -> Iterator[tuple[str, Federation]]:
    """The data with their test rows; the first is trained on, further ones differ in test rows only."""
    if name != "flights":
        yield name, ft.partition(ft.datasets.load(name), clients=10, alpha=0.5, seed=seed)
        return
    frame = read_flights(locate("flights"))
    past, future = (Table(frame[rows].reset_index(drop=True), [], "flights") for rows in split_months(frame["month"]))
    columns = {"categories": CATEGORIES, "numbers": (*NUMBERS, *WEATHER), "max_levels": DESTINATIONS}
    pooled = table_from_frame(past, "outcome", "carrier", classes=CLASSES, seed=seed, **columns)
    federation = partition(pooled, seed=seed)
    yield "flights, same months", federation
    number = {site: k for k, site in enumerate(federation.sites)}
    schema = TableSchema.from_dict(pooled.preprocessing)
    later = encode_site(labelled(future, schema, "flights"), schema)
    owners = np.array([number.get(str(site), -1) for site in future.frame["carrier"]])
    yield "flights, two months later", replace(federation, test=later, test_clients=owners)


def split_months(month: Any) -> tuple[Any, Any]:
    return month <= 10, month > 10


def problem_of(federation: Federation, settings: Settings) -> Problem:
    module = build_model("mlp", federation.input_shape, federation.n_classes, seed=settings.run.seed)
    rates = RATES.build("uniform", federation.n_clients, rate=0.4)
    return assemble(federation, module, METHODS.build("fedcgnm"), rates, settings)


def judge(name: str, problem: Problem, federation: Federation, x: torch.Tensor) -> dict[str, Any]:
    """All that the tables need, of one model on one test set."""
    plain = score_splits(problem, x)
    assert plain["validation"].pooled is not None and plain["test"].pooled is not None
    support = plain["validation"].pooled.bins[:, 1].sum(-1)
    target = int(np.where(support >= LEAST, support, support.sum()).argmin())
    out: dict[str, Any] = {
        "data": name,
        "class": federation.classes[target],
        "plain": described(problem, plain, target),
    }
    for title, wanted in DECISIONS.items():
        find = {"find": federation.classes[target]} if wanted.get("goal") == "recall" else {}
        decisions = choose_decisions(problem, x, DecisionSettings(**wanted, **find), federation.classes)
        out[title] = described(problem, score_splits(problem, x, decisions), target)
    out["pr_auc_error"] = exact_difference(problem, federation, x, plain)
    return out


def described(problem: Problem, splits: Splits, target: int) -> dict[str, Any]:
    test, pooled = metrics_of_test(problem, splits), splits["test"].pooled
    assert pooled is not None
    hit, alarms = int(pooled.confusion[target, target]), int(pooled.confusion[:, target].sum())
    own = worst_of(problem_sites(splits), splits, None)
    keys = ("macro_f1", "balanced_accuracy", "calibration_error", "log_loss", "pr_auc", "worst_site")
    found = {key: test[key] for key in keys}
    n = int(pooled.confusion[target].sum())
    return {**found, "site_mean": own["mean"], "found": hit, "of": n, "false_alarms": alarms - hit}


def problem_sites(splits: Splits) -> list[str]:
    return [str(k) for k in range(max(splits["test"].own, default=0) + 1)]


def exact_difference(problem: Problem, federation: Federation, x: torch.Tensor, plain: Splits) -> float:
    """The largest difference of binned PR-AUC from scikit-learn's, over classes with ten test samples or more."""
    parts = [
        probabilities_of(model_logits(problem.model, x, split.batches()), federation.n_classes)
        for _, split in client_splits(federation, "test")
    ]
    p, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    assert plain["test"].pooled is not None
    bins = plain["test"].pooled.bins
    kept = np.flatnonzero(np.bincount(y, minlength=len(bins)) >= 10)
    return max(abs(average_precision(bins[c]) - average_precision_score(y == c, p[:, c])) for c in kept)


def run(name: str, seed: int) -> list[dict[str, Any]]:
    settings = Settings.of(rounds=ROUNDS[name], lr=0.1, batch_size=128 if name == "flights" else 64, seed=seed)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"evaluate_every": ROUNDS[name]})})
    x, rows = None, []
    for title, federation in federations(name, seed):
        problem = problem_of(federation, settings)
        if x is None:
            x = train_rounds(problem, settings, problem.begin()).x
        rows.append({"seed": seed, **judge(title, problem, federation, x)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """What must be shown, as Markdown."""
    lines = []
    for name in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == name]
        lines += [
            f"\n{name}, {len(mine)} seeds:\n",
            "| | before | after | after − before, 95 % interval |",
            "|---|---:|---:|---:|",
        ]
        for what, key, title in (
            ("calibration error, temperature", "calibration_error", "temperature"),
            ("calibration error, vector", "calibration_error", "vector"),
            ("calibration error, vector at each site", "calibration_error", "vector, site"),
            ("worst site, common weights", "worst_site", "macro F1"),
            ("worst site, each site's own", "worst_site", "macro F1, site"),
            ("mean over sites, each site's own", "site_mean", "macro F1, site"),
            ("macro F1 of all rows, each site's own", "macro_f1", "macro F1, site"),
            ("balanced accuracy, all classes alike", "balanced_accuracy", "balanced"),
        ):
            before, after = ({row["seed"]: row[t][key] for row in mine} for t in ("plain", title))
            lines.append(f"| {what} | {mean(before):.4f} | {mean(after):.4f} | {interval(after, before)} |")
        lines.append(recall_line(mine, "recall"))
        lines.append(recall_line(mine, "recall, site"))
        lines.append(f"| largest error of a class's PR-AUC | | {max(row['pr_auc_error'] for row in mine):.4f} | |")
    return "\n".join(lines)


def recall_line(rows: list[dict[str, Any]], title: str) -> str:
    """Found on test rows, in how many seeds 95 % lies in the binomial interval, and false alarms for each one found."""
    met = 0
    for row in rows:
        low, high = wilson(row[title]["found"] / max(row[title]["of"], 1), row[title]["of"])
        met += low <= 0.95 <= high or row[title]["found"] >= 0.95 * row[title]["of"]
    shares = [{r["seed"]: r[t]["found"] / max(r[t]["of"], 1) for r in rows} for t in ("plain", title)]
    alarms = [np.mean([r[t]["false_alarms"] for r in rows]) for t in ("plain", title)]
    names = ", ".join(dict.fromkeys(str(r["class"]) for r in rows))
    said = f"met in {met} of {len(rows)} seeds; false alarms {alarms[0]:,.0f} → {alarms[1]:,.0f}"
    whose = "each site's threshold" if "site" in title else "one threshold"
    return f"| 95 % of {names}, {whose} | {mean(shares[0]):.3f} | {mean(shares[1]):.3f} | {said} |"


def mean(values: Mapping[Any, float]) -> float:
    return float(np.mean(list(values.values())))


def interval(after: Mapping[object, float], before: Mapping[object, float]) -> str:
    found = paired(after, before)
    return "" if found is None else f"{found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", choices=list(ROUNDS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON lines; seeds that are there already are not run again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    done = {(row["name"], row["seed"]) for row in rows}
    for name in args.data:
        for seed in range(args.seeds):
            if (name, seed) in done:
                continue
            began = time.perf_counter()
            found = [{"name": name, **row} for row in run(name, seed)]
            rows += found
            print(f"{name}, seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    print(table([row for row in rows if row["name"] in args.data]))


if __name__ == "__main__":
    main()
