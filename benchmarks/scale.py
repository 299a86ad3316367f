"""What a round costs for 5 to a million clients: bytes, operations, seconds, memory. Calibrated here, then checked.

    python benchmarks/scale.py [--rows 100] [--sampled 100] [--check] [--million] [--out scale.json]

The model has four times, fitted to measured rounds of the batched path on this machine: per step (calls), per sample
and step (arithmetic), per sampled client (drawing batches, checking and adding its update), per registered client
(vectors over all clients). ``--check`` compares it with rounds it was not fitted to.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from job import Job, in_turns
from workload import BATCH, FEATURES, make_workload

D = 4154
"""Parameters of the MLP."""
ROWS_PER_STEP = 64
"""Local runs the batched path moves in one step."""
GROUPS, GRAIN = 2, 8
"""Groups of classes; batches are padded to multiples of GRAIN."""


@dataclass(frozen=True)
class Times:
    """Seconds."""

    step: float
    sample: float
    client: float
    registered: float


@dataclass(frozen=True)
class Cost:
    """One round of FedCGNM, one local epoch; FedHOO's two probes double samples, clients and uploads."""

    registered: int
    sampled: int
    bytes_down: float
    bytes_up: float
    flops: float
    seconds: float
    memory: float


def counts(registered: int, sampled: int, rows: int, batch: int = BATCH) -> np.ndarray:
    """(4,) steps, samples, sampled and registered clients of a round: what ``Times`` multiplies."""
    local = -(-rows // batch)
    padded = local * min(batch, -(-rows // GRAIN) * GRAIN)
    return np.array([local * -(-sampled // ROWS_PER_STEP), sampled * padded, sampled, registered], dtype=np.float64)


def cost(times: Times, registered: int, sampled: int, rows: int, features: int = FEATURES, d: int = D) -> Cost:
    """The round's cost: on the wire of a real federation, and in the simulator.

    Memory: rows and their indices; a sampled client's update; models, gradients, momentum and activations of the runs
    in one step; the vectors over all clients.
    """
    wire = 4.0 * d * sampled
    flops = (6.0 + 2.0) * d * sampled * rows  # forward, backward, and a group's share of weight gradients twice
    data = registered * rows * (4.0 * features + 8.0)
    at_once = min(sampled, ROWS_PER_STEP)
    step = at_once * 4.0 * (d * (3 * GROUPS + 3) + BATCH * (features + 12 * 56))
    memory = data + registered * (8.0 * rows + 400.0) + 2 * wire + step
    return Cost(
        registered,
        sampled,
        wire,
        wire,
        flops,
        float(counts(registered, sampled, rows) @ list(asdict(times).values())),
        memory,
    )


def measure(cases: Sequence[tuple[int, int, int]], repeats: int) -> list[float]:
    """Least seconds of a round in each case, taken in turns."""
    jobs = {}
    for registered, sampled, rows in cases:
        work = make_workload(registered * rows)
        share = sampled / registered
        jobs[str((registered, sampled, rows))] = Job(
            work, work.federation(registered), "fedcgnm", rate=0.0, participation=share
        ).round
    return list(in_turns(jobs, repeats).values())


CALIBRATE = (
    (5, 5, 640), (5, 5, 3200), (20, 20, 640), (20, 20, 1600), (64, 64, 64), (64, 64, 640), (2000, 20, 64),
    (300_000, 20, 8),
)  # fmt: skip
CHECK = ((10, 10, 1280), (100, 100, 320), (1000, 1000, 64), (10_000, 100, 100), (100_000, 100, 10))


def calibrate() -> Times:
    """Non-negative least squares of relative errors."""
    rows = np.stack([counts(*case) for case in CALIBRATE])
    seconds = np.array(measure(CALIBRATE, repeats=8))
    a = rows / seconds[:, None]
    scale = a.max(0)
    weights = np.zeros(4)
    for _ in range(20_000):  # coordinate descent: four unknowns, no solver needed
        for j in range(4):
            rest = 1.0 - (a / scale) @ weights + (a / scale)[:, j] * weights[j]
            column = (a / scale)[:, j]
            weights[j] = max(0.0, float(column @ rest / (column @ column)))
    return Times(*(weights / scale))


def show(value: float, unit: str, factor: float) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < factor or prefix == "T":
            return f"{value:.3g} {prefix}{unit}"
        value /= factor
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100, help="training rows per client")
    parser.add_argument("--sampled", type=int, default=100, help="clients per round, where there are more")
    parser.add_argument("--check", action="store_true", help="compare with measured rounds")
    parser.add_argument(
        "--million", action="store_true", help="check a million registered clients too (6 GB of memory)"
    )
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = calibrate()
    result: dict[str, Any] = {"times": asdict(times), "table": [], "check": []}
    print("fitted, microseconds: " + ", ".join(f"{k} {v * 1e6:.3g}" for k, v in asdict(times).items()))
    print(f"{args.rows} rows per client, at most {args.sampled} clients sampled; FedCGNM, d = {D:,}, float32")
    print("  registered  sampled   down       up         operations  round      memory")
    for registered in (5, 100, 10_000, 1_000_000):
        c = cost(times, registered, min(registered, args.sampled), args.rows)
        result["table"].append(asdict(c))
        down, up = show(c.bytes_down, "B", 1e3), show(c.bytes_up, "B", 1e3)
        shown = f"{down:10s} {up:10s} {show(c.flops, '', 1e3):11s} {c.seconds * 1e3:7.1f} ms {show(c.memory, 'B', 1e3)}"
        print(f"  {registered:10,d} {c.sampled:8,d}   {shown}")
    cases = (*(CHECK if args.check else ()), *([(1_000_000, 100, 2)] if args.million else []))
    for registered, sampled, rows in cases:
        (seconds,) = measure([(registered, sampled, rows)], repeats=5)
        expected = cost(times, registered, sampled, rows).seconds
        case = {"registered": registered, "sampled": sampled, "rows": rows, "seconds": seconds, "model": expected}
        result["check"].append(case)
        print(f"check: {registered:,} registered, {sampled:,} sampled, {rows} rows each: ", end="")
        print(f"{seconds * 1e3:.1f} ms, the model says {expected * 1e3:.1f} ms")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
