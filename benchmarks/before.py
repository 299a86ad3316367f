"""Rounds of this checkout and of another one in turns: what a change costs or gains, as ratios of one run.

    python benchmarks/before.py ../old/checkout [--sizes 4k 24k 220k] [--clients 5 20] [--rounds 20] [--methods ...]

Each checkout runs in a process of its own, on one core, with the problem of ``simulator.py``; rounds take turns,
and the plain sequential loop runs among them. Times are CPU seconds, the least of all rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parents[1]


class Checkout:
    """A process that does a round when it is told to."""

    def __init__(self, root: Path, size: str, clients: int, method: str) -> None:
        paths = os.pathsep.join(str(root / part) for part in ("src", "benchmarks"))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "benchmarks" / "before.py"), "--child", size, str(clients), method],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.read()

    def read(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def round(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()


def child(size: str, clients: int, method: str) -> None:
    from job import Job
    from workload import SIZE_ROWS, SIZES, make_workload

    torch.set_num_threads(1)
    work = make_workload(SIZE_ROWS[size], SIZES[size])
    job = Job(work, work.federation(clients), method, rate=0.0)
    print(job.first, flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        job.round()
        print(time.process_time() - began, flush=True)


def compare(old: Path, size: str, clients: int, methods: list[str], rounds: int) -> None:
    from workload import SIZE_ROWS, SIZES, make_workload, sequential_round

    work = make_workload(SIZE_ROWS[size], SIZES[size])
    module, rng, x = work.module(), np.random.default_rng(0), torch.from_numpy(work.start)
    jobs = {
        (m, name): Checkout(root, size, clients, m) for m in methods for name, root in (("old", old), ("new", HERE))
    }
    best = dict.fromkeys([*jobs, ("loop", "")], float("inf"))
    for i in range(3 + rounds):
        for key, job in jobs.items():
            seconds = job.round()
            best[key] = min(best[key], seconds) if i >= 3 else best[key]
        began = time.process_time()
        sequential_round(work, module, x, clients, rng)
        best["loop", ""] = min(best["loop", ""], time.process_time() - began) if i >= 3 else best["loop", ""]
    for job in jobs.values():
        job.process.kill()
    loop = best["loop", ""]
    for m in methods:
        old_time, new = best[m, "old"], best[m, "new"]
        print(
            f"{size} K={clients:<3} {m:10} old {old_time * 1e3:7.2f} ms ({old_time / loop:.3f} of the loop), new "
            f"{new * 1e3:7.2f} ms ({new / loop:.3f}), new / old {new / old_time:.3f}", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="root of the other checkout")
    parser.add_argument("--sizes", nargs="+", default=["4k"])
    parser.add_argument("--clients", nargs="+", type=int, default=[5, 20])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedcgnm"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        child(args.child[0], int(args.child[1]), args.child[2])
        return
    for size in args.sizes:
        for clients in args.clients:
            compare(args.old.resolve(), size, clients, args.methods, args.rounds)


if __name__ == "__main__":
    main()
