"""CReFF's defaults, chosen by validation on problems that are not in `fedtail bench`.

    FEDTAIL_DATA=DIR python benchmarks/creff.py [--seeds 0,1,2] [--rounds 30] [--keep FILE]

From ``START`` one setting after the other takes every value of ``GRID``, and keeps the one with the best
mean rank over the problems, for two turns or until one changes nothing. A score is the macro F1 on the clients'
validation splits, a fifth of their samples, as a mean over the last ten rounds and all seeds; a seed draws clients,
splits, first weights and batches. A run that diverges scores 0. Test samples are not looked at. A set that is not there
is skipped, and nothing is downloaded.
``--keep`` adds a line of JSON to a file for every run, and reads there what has been run already.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fedtail as ft
from fedtail.data import DATASETS, Pooled, Samples
from fedtail.data.sources import is_here
from fedtail.errors import FedtailError
from fedtail.methods import METHODS

GRID = {
    "decay": (0.0, 0.1, 0.3, 1.0),
    "spread": (0.5, 1.0, 2.0, 4.0),
    "match_lr": (0.01, 0.03, 0.1, 0.3),
}
START = (0.3, 1.0, 0.1)
"""The defaults."""
TURNS = 2
LAST = 10
"""Rounds that a score is a mean over."""
Values = tuple[float, ...]
"""One value for each setting of ``GRID``."""


def every_tenth(imbalance: float) -> Pooled:
    """CIFAR-100's classes 0, 10, 20 and so on, 500 samples of the first and 32 of the last."""
    whole = DATASETS.build("cifar100", imbalance=imbalance)

    def some(samples: Samples) -> Samples:
        chosen = samples.y % 10 == 0
        return Samples(samples.x[chosen], samples.y[chosen] // 10)

    names = tuple(whole.classes[::10])
    return Pooled(some(whole.train), some(whole.test), classes=names, name="cifar100", transform=whole.transform)


@dataclass(frozen=True)
class Problem:
    """What is trained on. needs: the set whose files must be there."""

    title: str
    data: Callable[[], Pooled]
    split: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None


FROZEN = {"encoder": "efficientnet_lite0", "batch_size": 64}
PROBLEMS = (
    Problem("digits", lambda: DATASETS.build("digits", imbalance=20), fit={"model": "mlp"}),
    Problem(
        "blobs",
        lambda: DATASETS.build("blobs", n_classes=8, n_features=40, n_max=600, imbalance=50, spread=4.0),
        fit={"model": "mlp"},
    ),
    Problem(
        "CIFAR-10",
        lambda: DATASETS.build("cifar10", imbalance=20),
        split={"partition": "iid"},
        fit=FROZEN,
        needs="cifar10",
    ),
    Problem("CIFAR-100, every tenth", lambda: every_tenth(20), fit=FROZEN, needs="cifar100"),
)


def validated(problem: Problem, pooled: Pooled, method: Any, seed: int, rounds: int) -> float:
    """Macro F1 on the validation splits, mean over the last rounds."""
    split = {"clients": 5, "partition": "dirichlet", "alpha": 0.5, "validation": 0.2, **problem.split}
    settings = {"lr": 0.1, "batch_size": 32, "metric": "macro_f1", "evaluate_every": rounds, **problem.fit}
    model = settings.pop("model", None)
    result = ft.fit(
        ft.partition(pooled, seed=seed, **split),
        model,
        method,
        0.6,
        seed=seed,
        rounds=rounds,
        diagnostics=(),
        **settings,
    )
    return float(np.mean([record["validation"]["macro_f1"] for record in result.history[-LAST:]]))


class Scores:
    """Scores by problem, method and seed, each run once."""

    def __init__(self, problems: Sequence[Problem], seeds: Sequence[int], rounds: int, keep: Path | None) -> None:
        self.problems, self.seeds, self.rounds, self.keep = problems, seeds, rounds, keep
        self._pooled = {p.title: p.data() for p in problems}
        lines = keep.read_text().splitlines() if keep is not None and keep.is_file() else []
        self._known = {tuple(json.loads(line)["run"]): float(json.loads(line)["score"]) for line in lines}

    def __call__(self, values: Values | None) -> np.ndarray:
        """(problems, seeds); None is FedAvg."""
        return np.array([[self._one(p, values, seed) for seed in self.seeds] for p in self.problems])

    def _one(self, problem: Problem, values: Values | None, seed: int) -> float:
        key = (problem.title, *(values or ("fedavg",)), seed, self.rounds)
        if key not in self._known:
            method = "fedavg" if values is None else METHODS.build("creff", **dict(zip(GRID, values, strict=True)))
            try:
                self._known[key] = validated(problem, self._pooled[problem.title], method, seed, self.rounds)
            except FedtailError as error:
                print(f"{problem.title}, {values}, seed {seed}: {error}")
                self._known[key] = 0.0
            if self.keep is not None:
                with self.keep.open("a") as file:
                    file.write(json.dumps({"run": key, "score": self._known[key]}) + "\n")
        return self._known[key]


def ranks(means: np.ndarray) -> np.ndarray:
    """(settings,) mean over the problems of the place of each setting, 1 the best, ties shared. means: (settings,
    problems)."""
    above = (means[None] > means[:, None]).sum(1)
    same = (means[None] == means[:, None]).sum(1)
    return (above + (same + 1) / 2).mean(1)


def choose(scores: Scores) -> tuple[Values, list[Values]]:
    """The setting found, and all that were tried, in order."""
    now: Values = START
    tried = [now]
    for _ in range(TURNS):
        before = now
        for i, grid in enumerate(GRID.values()):
            rivals = [(*now[:i], value, *now[i + 1 :]) for value in grid]
            tried += [values for values in rivals if values not in tried]
            found = ranks(np.stack([scores(values).mean(1) for values in rivals]))
            if found.min() < found[rivals.index(now)]:
                now = rivals[int(found.argmin())]
        if now == before:
            break
    return now, tried


def table(scores: Scores, chosen: Values, tried: Sequence[Values]) -> str:
    """Means, and for each setting the difference to the first with the standard error of its mean over seeds."""
    start, places = scores(tried[0]), ranks(np.stack([scores(values).mean(1) for values in tried]))
    lines = [f"| {' | '.join(GRID)} | {' | '.join(p.title for p in scores.problems)} | mean rank |"]
    lines.append("|---" * (len(GRID) + len(scores.problems) + 1) + "|")
    for values, place in zip(tried, places, strict=True):
        found = scores(values)
        off = found - start
        error = off.std(1, ddof=1) / np.sqrt(len(scores.seeds)) if len(scores.seeds) > 1 else np.full(len(off), np.nan)
        cells = [f"{f:.3f} ({d:+.3f} ±{e:.3f})" for f, d, e in zip(found.mean(1), off.mean(1), error, strict=True)]
        mark = ", chosen" if values == chosen else ""
        lines.append(f"| {' | '.join(f'{v:g}' for v in values)} | {' | '.join(cells)} | {place:.2f}{mark} |")
    fedavg = " | ".join(f"{f:.3f}" for f in scores(None).mean(1))
    lines.append(f"| FedAvg {'| ' * (len(GRID) - 1)}| {fedavg} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    there = [p for p in PROBLEMS if p.needs is None or is_here(p.needs)]
    for problem in PROBLEMS:
        if problem not in there:
            print(f"{problem.title} is skipped: {problem.needs} is not where FEDTAIL_DATA says")
    scores = Scores(there, [int(s) for s in asked.seeds.split(",")], asked.rounds, asked.keep)
    print(table(scores, *choose(scores)))


if __name__ == "__main__":
    main()
