"""Are promises kept? Recall and sets over resampled splits of real tables; alarms of a monitor that should be quiet.

python benchmarks/promises.py coverage    promised recall and sets: how often kept, and what the promise costs
python benchmarks/promises.py monitor     1,000 lives of 12 months without a change; months until a change is noticed
python benchmarks/promises.py shift       promises after a shift of known size, as they were and recalibrated
python benchmarks/promises.py flights     nine months of flights after the three of training, month by month

Tables are those of ``tables.py aside DIR`` and the public data sets in FEDTAIL_DATA=DIR. One forest per table is
trained on the training rows. The test rows, which had no part in it, stand for all rows to come: 200 times half as many
are drawn from them, with replacement, to find thresholds and sets on, which are judged on all of them. Reference rows
and months of a monitor are drawn likewise, so that nothing has changed where nothing is made to.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from fedtail import fit
from fedtail.core.decisions import Decision
from fedtail.core.evidence import wilson
from fedtail.core.promise import cost_bound, prediction_sets, promise_recall, set_thresholds
from fedtail.core.scores import Scores, curve
from fedtail.data import Federation, partition
from fedtail.data.sources import locate
from fedtail.runs.judged import Judged, judge
from fedtail.runs.monitor import Watch
from fedtail.runs.recalibrate import recalibrate
from fedtail_experiments.data.flights import read_flights
from table_models import as_table

TABLES = ("unsw", "lending", "churn", "credit", "diamonds")
SPLITS = 200
RECALL, CONFIDENCE = 0.9, 0.9
COVERAGE = 0.9
REFERENCE, MONTHS, ROWS = 1000, 12, 200
"""Rows that a life begins with, its months, and the rows of each."""
LEAST = 22
"""Cases that a recall of .9 takes at a confidence of .9."""


def held_out(name: str) -> tuple[Federation, Judged]:
    """A forest's probabilities of the rows that it was not trained on."""
    pooled = as_table(name, 0, None)
    federation = partition(pooled, clients=10, alpha=0.5, seed=0) if pooled.sites is None else partition(pooled)
    model = fit(federation, method="trees", rounds=60).model()
    raw = replace(model, decision=Decision()).probabilities(federation.test.x)
    sites = federation.test_clients if federation.test_clients.size else None
    return federation, Judged(federation.classes, raw, Decision(), federation.test.y.numpy(), sites, federation.test.x)


def coverage(names: list[str]) -> None:
    """Print the share of splits in which a promise is kept, and what it costs against the plain threshold."""
    print("| table | of | cases | promise kept | plain threshold kept | precision, promised | plain | sets cover |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        _, judged = held_out(name)
        y, rng = judged.y, np.random.default_rng(0)
        assert y is not None
        places = {"all": np.ones(len(y), dtype=bool)}
        if judged.sites is not None:
            places |= {f"site {k}": judged.sites == k for k in np.unique(judged.sites)}
        for place, here in places.items():
            kept, plain, costs, covered, cases = [], [], [], [], []
            part = judged.part(here)
            assert part.y is not None
            counts = np.bincount(part.y, minlength=len(part.classes))
            wanted = [c for c in np.flatnonzero(counts >= 2.5 * LEAST) if counts[c] < len(part.y) / 2]
            for _ in range(SPLITS):
                now, later = part.part(rng.integers(len(part.y), size=len(part.y) // 2)), part
                bins = Scores.of(now.raw, now.y, tempered=False).bins
                limits = set_thresholds(bins, COVERAGE)
                sets = prediction_sets(later.raw, limits)
                for c in wanted:
                    own = later.y == c
                    promise = promise_recall(bins[c], RECALL, CONFIDENCE)
                    if not promise.kept or not own.any():
                        continue
                    thresholds, _, recall = curve(bins[c])
                    threshold = thresholds[recall >= RECALL - 1e-12][0]
                    for out, t in ((kept, promise.threshold), (plain, threshold)):
                        out.append((later.raw[own, c] >= t).mean() >= RECALL)
                    costs.append([own[later.raw[:, c] >= t].mean() for t in (promise.threshold, threshold)])
                    covered.append(sets[own, c].mean())
                    cases.append(promise.positives)
            if kept:
                cost = np.mean(costs, axis=0)
                print(
                    f"| {name} | {place}, {len(wanted)} classes | {min(cases)} to {max(cases)} | {np.mean(kept):.3f} "
                    f"| {np.mean(plain):.3f} | {cost[0]:.3f} | {cost[1]:.3f} | {np.mean(covered):.3f} |",
                    flush=True,
                )


def watched(judged: Judged) -> tuple[Judged, int]:
    """The same rows under a threshold that promises the rarest class with enough cases, and that class."""
    assert judged.y is not None
    counts = np.bincount(judged.y, minlength=len(judged.classes))
    target = min((c for c in range(len(counts)) if counts[c] >= LEAST), key=lambda c: int(counts[c]))
    bins = Scores.of(judged.raw, judged.y, tempered=False).bins[target]
    promise = promise_recall(bins, RECALL, CONFIDENCE)
    return replace(judged, decision=Decision().with_promise(target, promise, len(counts))), target


def recall_of(judged: Judged, target: int, weight: np.ndarray | None = None) -> float:
    assert judged.y is not None
    own = judged.y == target
    hit = judged.decision.answers(judged.p)[own] == target
    return float(np.average(hit, weights=None if weight is None else weight[own]))


def weights_of(judged: Judged, target: int, how: str, size: float) -> np.ndarray:
    """(N,) how often each row comes if the class comes, or its cases below the threshold come, so much more often."""
    assert judged.y is not None
    more = judged.y == target
    if how == "missed":
        more &= judged.decision.answers(judged.p) != target
    weight = np.where(more, size, 1.0)
    if how == "missed":  # the class as a whole comes as often as before
        own = judged.y == target
        weight[own] *= own.sum() / weight[own].sum()
    return weight / weight.sum()


def life(judged: Judged, promised: tuple[str, float], rng: np.random.Generator, later: Judged, share: Any) -> Any:
    """The first month with an alarm and what it says, of a life that ends with it; None of a quiet one."""
    n = len(judged.raw)
    watch = Watch.begin(judged.part(rng.integers(n, size=REFERENCE)), promised)
    for month in range(1, MONTHS + 1):
        look = watch.look(later.part(rng.choice(n, ROWS, p=share)))
        if look.changed:
            return month, look.changed
    return None


def monitor(names: list[str], lives: int) -> None:
    """Print the share of lives with an alarm although nothing changes, and how soon changes are noticed."""
    print(f"reference {REFERENCE} rows, {MONTHS} months of {ROWS} rows, all with labels")
    print("| table | change | lives | with an alarm | 95 % interval | months until half noticed | by what, mostly |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        began = time.process_time()
        judged, target = watched(held_out(name)[1])
        assert judged.x is not None
        promised = (judged.classes[target], recall_of(judged, target))  # exactly kept: the hardest case
        moving = int(judged.x.std(0).argmax())
        cases: list[tuple[str, int, Judged, Any]] = [("none", lives, judged, None)]
        for how, sizes in (("class", (2, 4)), ("missed", (2, 4))):
            for size in sizes:
                title = f"{promised[0]} {size} x as often" if how == "class" else f"missed cases {size} x as often"
                cases.append((title, lives // 10, judged, weights_of(judged, target, how, size)))
        for size in (0.25, 0.5):
            x = judged.x.clone()
            x[:, moving] += size * x[:, moving].std()
            cases.append((f"an input moved by {size} of its spread", lives // 10, replace(judged, x=x), None))
        for title, times, later, share in cases:
            found = [life(judged, promised, np.random.default_rng(i), later, share) for i in range(times)]
            months = sorted(one[0] if one else np.inf for one in found)
            by = Counter(what.split(" (")[0].split(" of ")[0] for one in found if one for what in one[1])
            low, high = wilson(np.isfinite(months).mean(), times)
            half = months[times // 2] if np.isfinite(months[times // 2]) else "-"
            most = ", ".join(f"{what} {n}" for what, n in by.most_common(2))
            alarms = int(np.isfinite(months).sum())
            print(f"| {name} | {title} | {times} | {alarms} | {low:.3f} to {high:.3f} | {half} | {most} |", flush=True)
        print(f"{name}: {time.process_time() - began:.0f} s of one core", file=sys.stderr)


def shift(names: list[str], splits: int) -> None:
    """Print how often promises hold after a shift of known size, as they were and recalibrated."""
    print("| table | shift | promised recall kept | cost bound kept | calibration error | noticed at once |")
    print("|  |  | before -> recalibrated | before -> recalibrated | before -> recalibrated -> without labels |  |")
    print("|---|---|---|---|---|---|")
    for name in names:
        judged, target = watched(held_out(name)[1])
        judged = replace(judged, sites=None)  # counts of sites add up to those of all rows
        n, c = len(judged.raw), len(judged.classes)
        costs = np.ones((c, c)) - np.eye(c)
        costs[target] *= 10
        for how, size in (("class", 1), ("class", 2), ("class", 4), ("class", 8), ("missed", 3)):
            weight = weights_of(judged, target, how, size)
            rows = []
            for split in range(splits):
                rng = np.random.default_rng(split)
                held = judged.part(rng.integers(n, size=n // 2))
                new = judged.part(rng.choice(n, n // 2, p=weight))
                rows.append(shifted(judged, weight, held, new, target, costs))
            kept, bound, error, noticed = (np.array([row[i] for row in rows]).mean(0) for i in range(4))
            title = f"missed cases {size} x as often" if how == "missed" else f"class {size} x as often"
            columns = [" -> ".join(f"{v:.3f}" for v in values) for values in (kept, bound, error)]
            print(f"| {name} | {title} | {' | '.join(columns)} | {noticed:.3f} |", flush=True)


def shifted(population: Judged, weight: np.ndarray, held: Judged, new: Judged, target: int, costs: np.ndarray) -> Any:
    """What one split says: promise kept, bound kept, calibration error, each before and after; and if it was noticed.

    A promise that the cases do not suffice for is not made and counts as kept.
    """
    c, truth = len(held.classes), np.zeros((len(population.raw), len(held.classes)))
    truth[np.arange(len(truth)), population.y] = 1.0

    def of(decision: Decision) -> tuple[float, float]:
        """The recall and the mean cost of an answer among all rows to come, by the threshold and by the costs."""
        rows = replace(population, decision=decision)
        answers = replace(decision, thresholds=(), costs=tuple(map(tuple, costs))).answers(rows.p)
        return recall_of(rows, target, weight), float(weight @ costs[population.y, answers])

    def error_of(decision: Decision) -> float:
        p = replace(population, decision=decision).p
        own = p[:, target]
        cell = np.minimum((own * 15).astype(int), 14)
        gap = np.bincount(cell, weight * (own - truth[:, target]), 15)
        return float(np.abs(gap).sum())

    def promised(decision: Decision, rows: Judged) -> tuple[bool, bool]:
        recall, cost = of(decision)
        by_cost = replace(decision, thresholds=(), costs=tuple(map(tuple, costs)))
        bound = cost_bound(replace(rows, decision=by_cost).scores.confusion, costs, CONFIDENCE)[1]
        promise = decision.promise
        return promise is None or not promise.kept or recall >= RECALL, cost <= bound

    plain = replace(held, decision=Decision())
    promise = promise_recall(plain.scores.bins[target], RECALL, CONFIDENCE)
    old = Decision().with_promise(target, promise, c)
    watch = Watch.begin(replace(held, decision=old))
    found = recalibrate(replace(new, decision=old)).decision
    unlabelled = recalibrate(replace(new, decision=old, y=None), watch).decision
    before, after = promised(old, held), promised(found, new)
    noticed = bool(watch.look(replace(new, decision=old)).changed)
    errors = tuple(error_of(d) for d in (old, found, unlabelled))
    return (before[0], after[0]), (before[1], after[1]), errors, noticed


def flights(target: str = "cancelled") -> None:
    """Print what a monitor says of flights month by month, of a forest trained on the first three months."""
    table = read_flights(locate("flights")).drop(columns="day")
    months = table.pop("month").to_numpy()
    early = np.flatnonzero(months <= 3)
    held = np.random.default_rng(0).random(len(early)) < 0.3
    train = table.iloc[early[~held]].reset_index(drop=True)
    federation = Federation.from_tables(train, label="outcome", site="carrier", validation=0.25)
    goal = {"goal": "recall", "find": target, "recall": 0.8, "confidence": CONFIDENCE}
    model = fit(federation, method="trees", rounds=60, decision=goal).model()
    rows = judge(model, table.iloc[early[held]].reset_index(drop=True))
    watch, last = Watch.begin(rows), model.decision
    c = model.classes.index(target)
    print(f"{watch.reference.n:,} reference rows of January to March; promised: recall of {target} {watch.recall:.2f}")
    print("| month | rows | cancelled | estimated | found | with last month's decision | promise | moved most |")
    print("|---|---|---|---|---|---|---|---|")
    for month in range(4, 13):
        now = judge(model, table[months == month].reset_index(drop=True))
        assert now.y is not None
        look = watch.look(now, f"2013-{month:02d}")
        found, cases = look.seen.found(c)
        renewed = recall_of(replace(now, decision=last), c)
        last = recalibrate(now).decision
        broken = any(what.startswith("recall of") for what in look.changed)
        moved = [what.removeprefix("input ") for what in look.changed if what.startswith("input ")]
        print(
            f"| {look.name} | {look.seen.n:,} | {(now.y == c).mean():.3f} | {look.mix[target]:.3f} "
            f"| {found / cases:.3f} of {cases} | {renewed:.3f} | {'broken' if broken else 'not refuted'} "
            f"| {', '.join(moved[:3])} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["coverage", "monitor", "shift", "flights"])
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--lives", type=int, default=1000, help="of 12 months each; a tenth of them for each change")
    parser.add_argument("--splits", type=int, default=SPLITS, help="of the shifted tables")
    args = parser.parse_args()
    names = args.tables.split(",")
    if args.what == "coverage":
        coverage(names)
    elif args.what == "monitor":
        monitor(names, args.lives)
    elif args.what == "shift":
        shift(names, args.splits)
    else:
        flights()


if __name__ == "__main__":
    main()
