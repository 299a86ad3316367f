"""What a user's own table gets by default: which network method, trees or networks or both, and which decision.

python benchmarks/choices.py train --tables choose --seeds 0,1,2 --keep DIR    every contender's probabilities, kept
python benchmarks/choices.py methods --tables choose --keep DIR                network methods against each other
python benchmarks/choices.py both --tables choose --keep DIR                   trees, a network, and their mean
python benchmarks/choices.py decisions --tables choose --keep DIR              when answers should lean to rare classes

Tables are those of ``tables.py aside DIR`` (FEDTAIL_DATA=DIR), cut to ``ROWS`` training rows; sites are the table's
own, or ten by Dirichlet(0.5). Networks have 30 rounds instead of 50, for time's sake; all else is what ``fit`` does.
``choose`` are the tables that choices are made on, ``judge`` those that had no part in any.

Written down before the first run, in this order:

- Methods: FedCGNM, FedCGNM at natural length, FedAvg and SCAFFOLD. The one with the best mean macro F1 on ``choose``
  becomes the default network of own tables if it is at least .005 ahead of FedCGNM with p < .05 (paired t-test over
  tables), its mean PR-AUC of the rarest third is not lower, and both differences keep their sign on ``judge``.
- Both: that network beside trees, the mean of their log-probabilities, and the choice of one of the three by log loss
  on validation, where another one than trees must be ahead by more than its standard error. What is best on ``choose``
  goes into the product if it is at least .005 ahead of trees with p < .05 there, and again on ``judge``.
- Decisions: answers lean to rare classes by the power that is best on validation, less k standard errors of its gain
  there (``gain_error``). Of k in ``ERRORS``, the one with the best mean of macro F1 and of the worst site's over trees
  and FedCGNM with 600 and with 1,500 rows, and of those within .002 of it the largest, is the default; ``judge`` says
  what it is worth. (Changed after ``choose`` and before ``judge`` was looked at: "less k errors" for "if its gain
  exceeds k errors", which is as good; and .002 for .001, since a default must first of all not cost one site dearly,
  which one error halves.)
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

from fedtail import fit
from fedtail.core.decisions import POWERS, gain_error
from fedtail.core.random import generator
from fedtail.core.significance import paired
from fedtail.data import Federation, partition, table_from_frame
from fedtail.data.federation import stratified_holdout
from fedtail.methods import METHODS
from fedtail.rounds.evaluation import client_splits, probabilities_of
from table_models import ASIDE, CHOOSE, NEWEST, frames

ROWS, ROUNDS = 1500, 30
"""Training rows of a table, at most; rounds of networks, for time's sake."""
MORE = ("diamonds", "attrition", "arrests", "lending", "credit", "contracts", "head", "taxi", "remote", "chains")
TABLES = {"choose": (*CHOOSE, *MORE), "judge": NEWEST}
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "trees": None,
    "fedcgnm": {},
    "fedavg": {},
    "scaffold": {},
    "natural": {"length": "natural"},
}
"""Name -> options of its method; None for trees."""
ERRORS = (0.0, 0.5, 1.0, 1.5, 2.0)
Kept = dict[str, np.ndarray]
"""``p_held``, ``y_held``, ``p_test``, ``y_test``, the sites of test rows ``site_test``, ``cpu``."""


def federation_of(name: str, seed: int, rows: int) -> Federation:
    train, test, label = frames(name, seed)
    if len(train) > rows:
        y = pd.factorize(train[label], sort=True)[0]
        _, kept = stratified_holdout(y, np.arange(len(y)), rows / len(y), generator(seed, f"{name}/rows"))
        train = train.iloc[kept].reset_index(drop=True)
        test = test[test[label].isin(train[label].unique())].reset_index(drop=True)
    pooled = table_from_frame(train, label, test=test, site=ASIDE[name].site)
    sites = (
        partition(pooled, clients=10, alpha=0.5, seed=seed) if pooled.sites is None else partition(pooled, seed=seed)
    )
    return replace(sites, own="table")


def train(names: Iterable[str], seeds: Iterable[int], contenders: Iterable[str], folder: Path, rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for seed in seeds:
        for name in names:
            for contender in contenders:
                path = folder / f"{name}-{seed}-{contender}.npz"
                if path.exists():
                    continue
                federation, options, began = federation_of(name, seed, rows), CONTENDERS[contender], time.process_time()
                method = None if options is None else METHODS.build("fedcgnm" if options else contender, **options)
                plain = {"decision": {"goal": "argmax"}, "diagnostics": (), "evaluate_every": 1000}
                plain |= {} if method is None else {"rounds": ROUNDS}
                result = fit(federation, None, method, seed=seed, workers=1, **plain)
                cpu = time.process_time() - began
                kept: Kept = {"cpu": np.array(cpu)}
                for split in ("validation", "test"):
                    parts = [(k, *told(result.module, s, k)) for k, s in client_splits(federation, split)]
                    short = "held" if split == "validation" else "test"
                    kept[f"p_{short}"] = np.concatenate([p for _, p, _ in parts])
                    kept[f"y_{short}"] = np.concatenate([y for _, _, y in parts])
                    kept[f"site_{short}"] = np.repeat([k for k, *_ in parts], [len(y) for *_, y in parts])
                np.savez_compressed(path, **kept)
                print(f"{name} {seed} {contender}: {cpu:.1f} s", flush=True)


def told(module: Any, split: Any, site: int) -> tuple[np.ndarray, np.ndarray]:
    module.eval()
    module.site = site
    return probabilities_of(((module(x).detach(), y) for x, y in split.batches()), split.n_classes)


def f1_of(confusion: np.ndarray) -> float:
    """Macro F1 over the classes that are there."""
    support, answered = confusion.sum(1), confusion.sum(0)
    each = 2 * np.diag(confusion) / np.maximum(support + answered, 1)
    return float(each[support > 0].mean()) if (support > 0).any() else float("nan")


def table_of(y: np.ndarray, answers: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(y * n + answers, minlength=n * n).reshape(n, n)


def decided(kept: Kept, errors: float) -> tuple[float, np.ndarray]:
    """(the power chosen on validation, answers to test rows)."""
    p, y, n = kept["p_held"], kept["y_held"], kept["p_held"].shape[1]
    share = np.maximum(np.bincount(y, minlength=n), 0.5) / len(y)
    tables = [table_of(y, (p * share**-power).argmax(1), n) for power in POWERS]
    values = [f1_of(t) - errors * gain_error(tables[0], t) for t in tables] if np.isfinite(errors) else [0.0]
    best = int(np.argmax(np.round(values, 9)))
    return POWERS[best], (kept["p_test"] * share ** -POWERS[best]).argmax(1)


def measures(kept: Kept, errors: float = 0.0) -> dict[str, float]:
    from sklearn.metrics import average_precision_score

    p, y, n = kept["p_test"], kept["y_test"], kept["p_test"].shape[1]
    power, answers = decided(kept, errors)
    counts = np.bincount(y, minlength=n)
    rare = [c for c in np.argsort(counts, kind="stable")[: max(1, n // 3)] if counts[c]]
    sites = [k for k in np.unique(kept["site_test"]) if k >= 0]
    at = {k: kept["site_test"] == k for k in sites}
    own = [f1_of(table_of(y[i], answers[i], n)) for i in at.values() if len(np.unique(y[i])) > 1]
    return {
        "macro_f1": f1_of(table_of(y, answers, n)),
        "worst_site": min(own) if own else float("nan"),
        "tail_pr_auc": float(np.mean([average_precision_score(y == c, p[:, c]) for c in rare])),
        "log_loss": float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)).mean()),
        "power": power,
        "cpu": float(kept["cpu"]),
    }


def mean_of(one: Kept, other: Kept) -> Kept:
    """The mean of log-probabilities, normalized again."""
    out = {**one, "cpu": one["cpu"] + other["cpu"]}
    for name in ("p_held", "p_test"):
        z = np.log(np.maximum(one[name], 1e-12)) + np.log(np.maximum(other[name], 1e-12))
        e = np.exp((z - z.max(1, keepdims=True)) / 2)
        out[name] = e / e.sum(1, keepdims=True)
    return out


def chosen(options: dict[str, Kept], first: str) -> Kept:
    """That with the least log loss on validation, if it is below that of ``first`` by more than its standard error."""
    rows = {
        k: -np.log(np.maximum(v["p_held"][np.arange(len(v["y_held"])), v["y_held"]], 1e-12)) for k, v in options.items()
    }
    best = min(rows, key=lambda k: rows[k].mean())
    less = rows[first] - rows[best]
    return options[best if less.mean() > less.std() / np.sqrt(max(len(less), 1)) else first]


def read(folder: Path, name: str, seed: int, contender: str) -> Kept:
    with np.load(folder / f"{name}-{seed}-{contender}.npz") as file:
        return {k: file[k] for k in file.files}


def compared(found: dict[str, dict[str, list[dict[str, float]]]], first: str) -> str:
    """A line per contender: means over tables, each the mean of its seeds, and the difference to ``first``."""
    keys = ("macro_f1", "worst_site", "tail_pr_auc", "log_loss")
    lines = [
        "| | " + " | ".join(keys) + f" | macro F1 against {first} | ahead | PR-AUC | worst site | lowest | CPU s |"
    ]
    lines.append("|---" * 11 + "|")
    means = {
        c: {k: {n: float(np.mean([r[k] for r in rows])) for n, rows in t.items()} for k in (*keys, "cpu")}
        for c, t in found.items()
    }
    for c, each in means.items():
        shown = [f"{np.nanmean(list(each[k].values())):.4f}" for k in keys]
        gap = {n: each["macro_f1"][n] - means[first]["macro_f1"][n] for n in each["macro_f1"]}
        against = ["", "", "", "", ""]
        if c != first:
            found_ = [
                paired(finite(each[k]), finite(means[first][k])) for k in ("macro_f1", "tail_pr_auc", "worst_site")
            ]
            said = ["" if f is None else f"{f.difference:+.4f} (p {f.p_t:.3f})" for f in found_]
            against = [
                said[0],
                f"{sum(v > 0 for v in gap.values())} of {len(gap)}",
                said[1],
                said[2],
                f"{min(gap.values()):+.3f}",
            ]
        lines.append(f"| {c} | " + " | ".join([*shown, *against, f"{np.mean(list(each['cpu'].values())):.1f}"]) + " |")
    return "\n".join(lines)


def harm(found: dict[str, dict[str, list[dict[str, float]]]], first: str) -> str:
    """A line per contender: in how many cases (table and seed) the worst site lost more than .05 against ``first``."""
    lines = []
    for title, tables in found.items():
        gaps = [
            a["worst_site"] - b["worst_site"] for n in tables for a, b in zip(tables[n], found[first][n], strict=True)
        ]
        lost = np.array([gap for gap in gaps if np.isfinite(gap)])
        if title != first:
            lines.append(
                f"{title}: worst site lost more than .05 in {(lost < -0.05).mean():.1%}, most {lost.min():+.3f}"
            )
    return "\n".join(lines)


def finite(values: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in values.items() if np.isfinite(v)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "methods", "both", "decisions"])
    parser.add_argument("--tables", default="choose", help="choose, judge, or names")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--network", default="fedcgnm", help="of `both`")
    parser.add_argument("--errors", type=float, default=0.0, help="of the decision, for `methods` and `both`")
    parser.add_argument("--rows", type=int, default=ROWS, help="of training, at most")
    parser.add_argument("--keep", type=Path, default=Path("choices"))
    given = parser.parse_args()
    names, seeds = TABLES.get(given.tables, given.tables.split(",")), [int(s) for s in given.seeds.split(",")]
    contenders = given.contenders.split(",")
    if given.what == "train":
        train(names, seeds, contenders, given.keep, given.rows)
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}

    def add(title: str, name: str, kept: Kept, errors: float) -> None:
        found.setdefault(title, {}).setdefault(name, []).append(measures(kept, errors))

    for name in names:
        for seed in seeds:
            if given.what == "methods":
                for c in contenders:
                    add(c, name, read(given.keep, name, seed, c), given.errors)
            elif given.what == "both":
                trees, network = (read(given.keep, name, seed, c) for c in ("trees", given.network))
                options = {"trees": trees, given.network: network, "mean": mean_of(trees, network)}
                for title, kept in {**options, "chosen": chosen(options, "trees")}.items():
                    add(title, name, kept, given.errors)
            else:
                for c in contenders:
                    kept = read(given.keep, name, seed, c)
                    add(f"{c}, argmax", name, kept, np.inf)
                    for k in ERRORS:
                        add(f"{c}, {k:g} errors", name, kept, k)
    if given.what == "decisions":
        for c in contenders:
            own = {t: rows for t, rows in found.items() if t.startswith(f"{c},")}
            print(compared(own, f"{c}, argmax"), harm(own, f"{c}, argmax"), sep="\n\n", end="\n\n")
    else:
        print(compared(found, "fedcgnm" if given.what == "methods" else "trees"))


if __name__ == "__main__":
    main()
