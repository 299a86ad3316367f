"""The CPU simulator against a plain PyTorch loop, against itself, and against other simulators; ratios of one run.

    python benchmarks/simulator.py [--peers] [--rounds 12] [--out simulator.json]

The work: 32,561 rows, the MLP 104-32-16-8-2 with GroupNorm, batch 64, one local epoch, SGD at 0.1, one thread. A round
is all of ``train_rounds`` (sampling, batches, training, checks, aggregation) without evaluation. Times are the
least of several repeats, taken in turns, so that a busy machine disturbs both sides alike. ``--peers`` sets up Flower,
pfl-research and fedjax, each in a virtual environment of its own under .cache/peers, and gives them the same rows,
clients, initial model, batches, epochs and rounds; all must end at the same training loss.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from job import WARM, Job, in_turns
from other_simulators import against_peers
from workload import Workload, make_workload, sequential_round


def against_loop(work: Workload, clients: int, repeats: int) -> dict[str, Any]:
    """Our rounds in units of the plain sequential loop's, and FedCGNM's and FedHOO's in units of simpler ones."""
    federation, module = work.federation(clients), work.module()
    held = work.federation(clients, validation=0.1)
    rng, x = np.random.default_rng(0), torch.from_numpy(work.start)
    ours = Job(work, federation, "fedavg", rate=0.0)
    grouped = Job(work, federation, "fedcgnm", rate=0.0)
    plain = Job(work, federation, "fedavg", rate=0.0, path="reference")
    jobs: dict[str, Callable[[], object]] = {
        "sequential": lambda: sequential_round(work, module, x, clients, rng),
        "reference": plain.round, "fedavg": ours.round, "fedcgnm": grouped.round,
    }  # fmt: skip
    if clients <= 6:
        uniform = Job(work, held, "fedcgnm", rate=0.6)
        hoo = Job(work, held, "fedcgnm", rates="fedhoo", max_rounds=10**6, stable_rounds=10**6)
        jobs |= {"fedcgnm_uniform": uniform.round, "fedcgnm_fedhoo": hoo.round}
    t = in_turns(jobs, repeats)
    out = {
        "clients": clients, "seconds": t, "first_round_seconds": {"fedavg": ours.first, "fedcgnm": grouped.first},
        "fedavg / sequential": t["fedavg"] / t["sequential"],
        "fedavg / our reference path": t["fedavg"] / t["reference"],
        "fedcgnm / fedavg": t["fedcgnm"] / t["fedavg"],
        "engine": ours.problem.engine.info(),
    }  # fmt: skip
    if "fedcgnm_fedhoo" in t:
        out["fedcgnm+fedhoo / fedcgnm+uniform"] = t["fedcgnm_fedhoo"] / t["fedcgnm_uniform"]
    return out


def same_loss(work: Workload, clients: int, rounds: int) -> tuple[float, float]:
    """Training loss after ``rounds`` of the sequential loop and of ours: the same work must be done."""
    rng, x, module = np.random.default_rng(1), torch.from_numpy(work.start), work.module()
    for _ in range(rounds):
        x = sequential_round(work, module, x, clients, rng)
    ours = Job(work, work.federation(clients), "fedavg", rate=0.0)
    for _ in range(rounds - 1):
        ours.round()
    return work.loss(x), work.loss(ours.state.x)


def many_registered(registered: int, sampled: int = 100, rows: int = 100) -> dict[str, Any]:
    """A round with ``sampled`` of ``registered`` clients against one with as many clients in all; and memory.

    In a process of its own, which reads the rows from disk: what making them took is not part of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, clients in (("few", sampled), ("many", registered)):
            work = make_workload(clients * rows)
            for key in ("x", "y", "order", "start"):
                np.save(Path(folder) / f"{name}-{key}.npy", getattr(work, key))
            del work
        command = [sys.executable, __file__, "--child", folder, str(registered), str(sampled)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def registered_child(folder: Path, registered: int, sampled: int, repeats: int = 8) -> dict[str, Any]:
    def load(name: str) -> Workload:
        return Workload(*(np.load(folder / f"{name}-{key}.npy") for key in ("x", "y", "order", "start")))

    few = load("few")
    base = Job(few, few.federation(sampled, validation=0.1), "fedcgnm", rate=0.4, validate_every=1)
    for _ in range(WARM):
        base.round()
    before = _resident()
    many = load("many")
    federation = many.federation(registered, validation=0.1)
    large = Job(many, federation, "fedcgnm", rate=0.4, participation=sampled / registered, validate_every=1)
    t = in_turns({"all sampled": base.round, "one in a hundred": large.round}, repeats)
    return {
        "registered": registered, "sampled": sampled, "seconds": t, "data_bytes": many.x.nbytes,
        "round time ratio": t["one in a hundred"] / t["all sampled"],
        "memory / data": (_peak() - before) / many.x.nbytes,
    }  # fmt: skip


def _resident() -> int:
    """Bytes this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    """Most bytes this process has held."""
    line = next(v for v in Path("/proc/self/status").read_text().splitlines() if v.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="set up and time Flower, pfl-research and fedjax too")
    parser.add_argument("--rounds", type=int, default=12, help="repeats of each measurement")
    parser.add_argument("--registered", type=int, default=10_000, help="clients of the scale measurement; 0 skips it")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if args.child:
        print(json.dumps(registered_child(Path(args.child[0]), int(args.child[1]), int(args.child[2]))))
        return
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}"
    result: dict[str, Any] = {"machine": machine, "load": os.getloadavg()[0]}
    print(f"{result['machine']}; load {os.getloadavg()[0]:.1f}")
    if args.registered:
        result["registered"] = r = many_registered(args.registered)
        print(f"{r['registered']:,} registered, {r['sampled']} sampled, against {r['sampled']} in all:")
        print(f"   round time {r['round time ratio']:.2f}, memory {r['memory / data']:.2f} of the data")
    work = make_workload()
    for clients in (5, 20):
        result[f"K={clients}"] = r = against_loop(work, clients, args.rounds)
        r["losses"] = losses = same_loss(work, clients, 4)
        t = r["seconds"]
        print(f"K={clients}: sequential loop {t['sequential'] * 1e3:.0f} ms, ours {t['fedavg'] * 1e3:.1f} ms per round")
        for name in (n for n in r if "/" in n):
            print(f"   {name:36s} {r[name]:.3f}")
        print(f"   first round, in which steps are captured: {r['first_round_seconds']['fedavg']:.1f} s")
        print(f"   loss after 4 rounds: {losses[0]:.4f} sequential, {losses[1]:.4f} ours")
    for clients in (5, 20) if args.peers else ():
        result[f"peers K={clients}"] = r = against_peers(work, clients, args.rounds)
        for name, value in r.items():
            if "error" in value:
                print(f"K={clients} {name:8s} not measured: {value['error'].splitlines()[-1]}")
                continue
            slower = f"{value['times slower']:.1f} times slower" if "times slower" in value else ""
            print(f"K={clients} {name:8s} {value['seconds'] * 1e3:8.1f} ms, loss {value['loss']:.4f}  {slower}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
