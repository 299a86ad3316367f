"""Are promises kept? Recall and sets over resampled splits of real tables; alarms of a monitor that should be quiet.

python benchmarks/promises.py coverage    promised recall and sets: how often kept, and what the promise costs
python benchmarks/promises.py monitor     lives of 1,000 months without a change; months until a change is noticed
python benchmarks/promises.py flights     two months of flights that had no part in training, week by week

Tables are those of ``tables.py aside DIR`` and the public data sets in FEDTAIL_DATA=DIR. One forest per table is
trained on the training rows. The test rows, which had no part in it, stand for all rows to come: 200 times half as many
are drawn from them, with replacement, to find thresholds and sets on, which are judged on all of them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from fedtail import fit
from fedtail.core.decisions import Decision
from fedtail.core.promise import prediction_sets, promise_recall, set_thresholds
from fedtail.core.scores import Scores, precision_at_recall
from fedtail.data import Federation, partition
from fedtail.runs.judged import Judged
from fedtail.runs.monitor import Watch, begin
from table_models import as_table

TABLES = ("unsw", "lending", "churn", "credit", "diamonds")
SPLITS = 200
RECALL, CONFIDENCE = 0.9, 0.9
COVERAGE = 0.9
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
                    _, threshold = precision_at_recall(bins[c], RECALL)
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


def monitor(names: list[str], lives: int = 20, months: int = 1000, rows: int = 200) -> None:
    """Print the share of lives with an alarm, and months until a shift of one input or of the class mix is noticed."""
    print("| table | lives of 1,000 months with an alarm | months until: mix doubled | an input moved by .5 |")
    print("|---|---|---|---|")
    for name in names:
        _, judged = held_out(name)
        y, rng = judged.y, np.random.default_rng(0)
        assert y is not None and judged.x is not None
        rarest = int(np.argmin(np.bincount(y, minlength=len(judged.classes))))
        weight = np.where(y == rarest, 2.0, 1.0) / np.where(y == rarest, 2.0, 1.0).sum()
        moving = int(judged.x.std(0).argmax())
        alarms, mix, moved = 0, [], []
        for life in range(lives):
            order = rng.permutation(len(y))
            watch = begin(judged.part(order[: len(y) // 2]), {})
            rest = judged.part(order[len(y) // 2 :])
            alarms += first_alarm(watch, rest, months, rows, rng) is not None
            if life < 5:
                share = weight[order[len(y) // 2 :]]
                mix.append(first_alarm(restarted(watch), rest, 60, rows, rng, share / share.sum()) or 60)
                x = rest.x.clone()
                x[:, moving] += 0.5
                moved.append(first_alarm(restarted(watch), replace(rest, x=x), 60, rows, rng) or 60)
        print(f"| {name} | {alarms} of {lives} | {np.median(mix):g} | {np.median(moved):g} |", flush=True)


def restarted(watch: Watch) -> Watch:
    return replace(watch, looks=[])


def first_alarm(
    watch: Watch, rest: Judged, months: int, rows: int, rng: np.random.Generator, share: np.ndarray | None = None
) -> int | None:
    """The first month in which something is said to have changed; every month draws its rows anew."""
    assert rest.y is not None
    for month in range(months):
        if watch.look(rest.part(rng.choice(len(rest.y), rows, p=share)), str(month))["changed"]:
            return month + 1
        if len(watch.looks) > 24:  # older looks are in no span; only their labels count
            watch.looks[-25]["counts"] = watch.looks[-1]["counts"]
    return None


def flights() -> None:
    """Print what a monitor says of the two months after the training months, week by week."""
    _, judged = held_out("flights")
    n = len(judged.raw)
    watch = begin(judged.part(np.arange(n // 4)), {})
    for week, rows in enumerate(np.array_split(np.arange(n // 4, n), 8)):
        watch.look(judged.part(rows), f"part {week + 1} of 8")
        print(watch.sentence())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["coverage", "monitor", "flights"])
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--lives", type=int, default=20)
    args = parser.parse_args()
    names = args.tables.split(",")
    if args.what == "coverage":
        coverage(names)
    elif args.what == "monitor":
        monitor(names, args.lives)
    else:
        flights()


if __name__ == "__main__":
    main()
