"""Memory of a federation's server, by number of sites.

    python benchmarks/memory.py                      the table in docs/deploy.md: K = 3, 12, 50, 100, a model of 44 MB
    python benchmarks/memory.py --sites 3 --hidden 500

Sites are simulated at the transport: each answers with random numbers that are made when it is asked and gone when the
server has taken them, so that one machine can play a hundred sites, and what grows is the server's. All above the
transport is what runs on Flower and NVFlare: messages as bytes, the engine, the round loop. Each case runs in a process
of its own; printed is the peak of its resident memory over that before the first round, in megabytes and in models, and
the seconds of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load

from fedtail.core.records import Update
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.transport import Errors, Phase, Take
from fedtail.federate.protocol.wire import META, Parcel, Parts, pack, pack_update
from fedtail.federate.server import MEMORY_MB
from fedtail.federate.sites import Sites
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem
from fedtail.settings import Settings

SAMPLES, CLASSES, ROUNDS, MOST_AXES = 1000, 4, 2, 8
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "FedCGNM": ("fedcgnm", "uniform", ()),
    "FedCGNM, alignment": ("fedcgnm", "uniform", ("alignment",)),
    "FedNoRo": ("fednoro", "uniform", ()),
    "FedHOO": ("fedcgnm", "fedhoo", ()),
}
"""Name -> method, rate strategy, diagnostics."""
OPTIONS = {"fednoro": {"warmup": 0}}
"""FedNoRo compares updates once it has told clean clients from noisy ones."""


class RandomSites:
    """A transport whose sites answer at once."""

    name = "random"

    def __init__(self, n_clients: int, size: int) -> None:
        self.n_clients, self.size = n_clients, size

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        for client, parts in payloads.items():
            take(client, self.answer(phase, parts))
        return {}

    def answer(self, phase: str, parts: Parts) -> Parts:
        meta = json.loads(parts[META])
        if phase == Phase.TRAIN:
            probes = len(load(parts["tensor/probe/rate"])["t"])
            update = Update(
                client=meta["client"],
                delta=torch.randn(probes, self.size) * 1e-7,
                n_samples=SAMPLES,
                steps=(10,) * probes,
                loss=(1.0,) * probes,
            )
            return pack(pack_update(update, {"round": meta["task"]["round"]}))
        if phase == Phase.VALIDATE:
            n = len(load(parts["tensor/patterns"])["t"])
            return pack(Parcel({}, {"counts": torch.randint(1, 100, (n, 3, 1))}))
        if phase == Phase.MEASURE:
            return pack(Parcel({}, {"value": torch.rand(CLASSES) + meta["client"] % 2}))
        return pack(Parcel({}, {split: torch.tensor([50, 100]) for split in meta["splits"]}))

    def close(self) -> None: ...


def measure(case: str, sites: int, hidden: int) -> dict[str, float]:
    """One case, in this process."""
    torch.set_num_threads(1)
    method, rates, diagnostics = CASES[case]
    options = OPTIONS.get(method, {})
    settings = Settings.of(rounds=ROUNDS, diagnostics=diagnostics, lr=0.01)
    job = Job(
        run="memory",
        model="mlp",
        input_shape=(hidden,),
        classes=tuple(map(str, range(CLASSES))),
        method=method,
        method_options=options,
        rounds=ROUNDS,
        model_options={"hidden": (hidden, hidden)},
        local=settings.local,
    )
    size = sum(p.numel() for p in job.build_model().parameters())
    folder = tempfile.TemporaryDirectory()
    engine = RemoteEngine(
        Sites(RandomSites(sites, size), job, np.full(sites, SAMPLES)),
        spool=Path(folder.name),
        memory_mb=MEMORY_MB,
    )
    strategy = RATES.build(rates, sites, **({"cold_rounds": 0} if rates == "fedhoo" else {}))
    problem = Problem(engine=engine, method=job.build_method(), rates=strategy, n_classes=job.n_classes, real=True)
    state, before = problem.begin(), peak_mb()
    began = time.perf_counter()
    train_rounds(problem, settings, state)
    seconds = (time.perf_counter() - began) / ROUNDS
    folder.cleanup()
    grown = peak_mb() - before
    return {"mb": grown, "models": grown / (4e-6 * size), "model_mb": 4e-6 * size, "seconds": seconds}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 8, 12, 50, 100])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--hidden", type=int, default=2340, help="Width of three layers; 2340 makes 44 MB.")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.cases[0], options.sites[0], options.hidden)))
        return
    print(f"load {os.getloadavg()[0]:.1f}\n| | sites | MB | models | seconds |\n|---|---|---|---|---|")
    for case in options.cases:
        for sites in options.sites:
            if case == "FedHOO" and sites > MOST_AXES:
                continue  # 2^K candidates: beyond, the search is over clusters of sites
            command = [sys.executable, __file__, "--one", "--cases", case, "--sites", str(sites)]
            done = subprocess.run([*command, "--hidden", str(options.hidden)], check=True, stdout=subprocess.PIPE)
            found = json.loads(done.stdout)
            print(
                f"| {case} | {sites} | {found['mb']:.0f} | {found['models']:.1f} | {found['seconds']:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
