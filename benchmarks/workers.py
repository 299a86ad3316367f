"""What every further core brings, and that it changes no bit.

    python benchmarks/workers.py [--workers 1,2] [--repeats 5] [--rows 80000] [--sites 51] [--out workers.json]

The work: a table of 80,000 rows and 281 columns, 260 of them one-hot, at 51 sites of very unequal size, with a tenth of
each held out; MLP 256-128-64 with GroupNorm, batch 64, one local epoch, FedCGNM. A round is all of ``train_rounds``,
validation and test among it. ``--workers`` are by default 1, 2, 4 ... up to the cores that this process may use. Every
number of workers trains the same rounds from the same start, in turns, so that a busy machine disturbs all alike; after
every round their models must be the same bits. Told are the median seconds of a round (but for the first three, where
steps are captured), how many times faster than one worker by the median of the ratios of a turn, rows a second, and the
same for evaluation alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.cores import usable_cores
from fedtail.data.federation import Federation, Samples
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.runs.build import assemble
from fedtail.settings import Settings

HIDDEN, CLASSES, FEATURES, BATCH = (256, 128, 64), 8, 281, 64
LEVELS = [int(n) for n in np.linspace(3, 17, 26)]
"""Of the categories: 260 one-hot columns."""
WARM = 3
"""Rounds before the clock counts."""


def table(rows: int, sites: int, seed: int = 0) -> Federation:
    """One-hot categories and a few numbers, eight classes with a long tail, sites whose sizes differ tenfold."""
    rng = np.random.default_rng(seed)
    columns = [rng.standard_normal((rows, FEATURES - sum(LEVELS)), dtype=np.float32)]
    for n in LEVELS:
        columns.append(np.eye(n, dtype=np.float32)[rng.choice(n, size=rows, p=rng.dirichlet(np.ones(n)))])
    x = np.concatenate(columns, axis=1)
    tail = 2 * np.log([0.42, 0.25, 0.15, 0.1, 0.05, 0.02, 0.008, 0.002])
    y = (x @ rng.standard_normal((FEATURES, CLASSES)) + tail + rng.gumbel(size=(rows, CLASSES))).argmax(1)
    test, rest = np.split(rng.permutation(rows), [rows // 5])
    shares = rng.dirichlet(np.full(sites, 2.0)) + 0.2 / sites
    owner = rng.choice(sites, size=len(rest), p=shares / shares.sum())
    own = [rest[owner == k] for k in range(sites)]
    pool = Samples(torch.from_numpy(x), torch.from_numpy(y))
    return Federation(
        pool, tuple(rows[len(rows) // 10 :] for rows in own), tuple(rows[: len(rows) // 10] for rows in own),
        Samples(pool.x[test], pool.y[test]), tuple("abcdefgh"), tuple(f"site {k}" for k in range(sites)),
    )  # fmt: skip


class Run:
    """The same run with so many workers, a round at a time."""

    def __init__(self, federation: Federation, workers: int, path: str) -> None:
        module = build_model("mlp", (FEATURES,), CLASSES, hidden=HIDDEN, seed=0)
        settings = Settings.of(batch_size=BATCH, path=path, workers=workers)
        rates = RATES.build("uniform", federation.n_clients, rate=0.6)
        self.problem = assemble(federation, module, METHODS.build("fedcgnm"), rates, settings)
        self.state = self.problem.begin()
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.evaluating: list[float] = []

    def round(self) -> str:
        """Train and evaluate; the digest of the model."""
        plan = Settings.of(rounds=self.state.round + 1, schedule="constant", lr=0.1, diagnostics=())
        began, used = time.perf_counter(), time.process_time()
        self.state = train_rounds(self.problem, plan, self.state)
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - used)
        began = time.perf_counter()
        counts = self.problem.engine.confusion(self.state.x, "test")
        self.evaluating.append(time.perf_counter() - began)
        return hashlib.sha256(self.state.x.numpy().tobytes() + counts.tobytes()).hexdigest()[:16]


def faster(one: Sequence[float], other: Sequence[float]) -> float:
    """How many times, by the median of the turns: neighbours in time had the same machine."""
    return statistics.median(a / b for a, b in zip(one[WARM:], other[WARM:], strict=True))


def measure(federation: Federation, counts: Sequence[int], repeats: int, path: str, limit: float) -> dict[str, Any]:
    began = time.perf_counter()
    runs = {n: Run(federation, n, path) for n in counts}
    for turn in range(WARM + repeats):
        digests = {n: run.round() for n, run in runs.items()}
        if len(set(digests.values())) > 1:
            raise SystemExit(f"round {turn}: the models differ between numbers of workers: {digests}")
        if turn > WARM and time.perf_counter() - began > limit:
            break
    one = runs[counts[0]]
    rows = int(one.problem.engine.sizes.sum())
    found = {
        n: {
            "seconds": statistics.median(run.seconds[WARM:]),
            "times": faster(one.seconds, run.seconds),
            "turns": [round(a / b, 3) for a, b in zip(one.seconds[WARM:], run.seconds[WARM:], strict=True)],
            "processor_seconds": statistics.median(run.processor[WARM:]),
            "rows_per_second": rows / statistics.median(run.seconds[WARM:]),
            "evaluation_times": faster(one.evaluating, run.evaluating),
            "first_round": run.seconds[0],
        }
        for n, run in runs.items()
    }
    return {"digest": digests[counts[0]], "rounds": len(one.seconds), "engine": runs[counts[-1]].problem.engine.info(),
            "workers": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", help="numbers of workers, separated by commas, the first is what others count in")
    parser.add_argument("--repeats", type=int, default=5, help="rounds on the clock")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which no further round is begun")
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--sites", type=int, default=51)
    parser.add_argument("--path", default="batched", choices=["batched", "reference"])
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    args = parser.parse_args()
    cores = usable_cores()
    counts = [int(n) for n in args.workers.split(",")] if args.workers else curve(cores)
    machine = f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}"
    print(f"{machine}, torch {torch.__version__}; load {os.getloadavg()[0]:.1f}")
    federation = table(args.rows, args.sites)
    sizes = federation.sizes
    print(f"{args.rows:,} rows, {args.sites} sites of {sizes.min()} to {sizes.max()} rows; {args.path}")
    result = {"machine": machine, "load": os.getloadavg()[0], "sites": args.sites, "rows": args.rows}
    result |= measure(federation, counts, args.repeats, args.path, args.limit)
    print(f"{result['rounds']} rounds each, all with the digest {result['digest']}")
    print("workers  s a round  times faster   rows/s  processor s  evaluation  first round s")
    for n, row in result["workers"].items():
        print(
            f"{n:7d}  {row['seconds']:9.3f}  {row['times']:12.2f}  {row['rows_per_second']:7,.0f}  "
            f"{row['processor_seconds']:11.2f}  {row['evaluation_times']:10.2f}  {row['first_round']:13.2f}"
        )
    for n, row in result["workers"].items():
        if n != counts[0]:
            print(f"{n} workers, turn by turn: {' '.join(f'{t:.2f}' for t in row['turns'])}")
    result["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory {result['peak_gb']:.2f} GB; engine {result['engine']}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


def curve(cores: int) -> list[int]:
    """1, 2, 4 ... and all."""
    doubled = [2**i for i in range(cores.bit_length()) if 2**i <= cores]
    return doubled if doubled[-1] == cores else [*doubled, cores]


if __name__ == "__main__":
    main()
