"""The CPU simulator against a plain PyTorch loop, against itself, and against other simulators; ratios of one run.

    python benchmarks/simulator.py [--peers] [--sizes 4k 24k 220k 2M] [--cores one|all] [--images]

The work: rows like the Adult table's, an MLP with GroupNorm and 4k, 24k, 220k or 2M parameters, batch 64, one local
epoch, SGD at 0.1 (2M: 0.02); 32,561 rows, for the two large ones 8,192 and 4,096. A round is all of ``train_rounds``
(sampling, batches, training, checks, aggregation) without evaluation. Times are the least of several repeats, taken in
turns, so that a busy machine disturbs both sides alike. ``--peers`` sets up Flower, pfl-research and fedjax, each in a
virtual environment of its own under .cache/peers, and gives them the same rows, clients, initial model, batches,
epochs and rounds; all must end at the same training loss. ``--cores all`` gives every core to everybody: to the loop
as torch's threads, to us as workers, to the others as what they have for it. ``--images`` times a small CNN on
64-pixel images at five clients on the reference path and in chunks.
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.core.records import Task
from fedtail.cores import usable_cores
from fedtail.data.federation import Federation, Transform
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.settings import Settings
from fedtail.simulate import simulator
from job import WARM, Job, in_turns
from other_simulators import against_peers
from workers import LEVELS, table
from workload import BATCH, FEATURES, SIZE_ROWS, SIZES, Workload, fastest, make_workload, sequential_round


def against_loop(work: Workload, clients: int, repeats: int, cores: int) -> dict[str, Any]:
    """Our rounds in units of the plain sequential loop's, and FedCGNM's and FedHOO's in units of simpler ones."""
    federation, module = work.federation(clients), work.module()
    held = work.federation(clients, validation=0.1)
    rng, x = np.random.default_rng(0), torch.from_numpy(work.start)
    ours = Job(work, federation, "fedavg", rate=0.0, workers=cores)
    grouped = Job(work, federation, "fedcgnm", rate=0.0, workers=cores)
    plain = Job(work, federation, "fedcgnm", rate=0.0, path="reference", workers=cores)

    def loop() -> None:
        torch.set_num_threads(cores)
        sequential_round(work, module, x, clients, rng)
        torch.set_num_threads(1)

    jobs: dict[str, Callable[[], object]] = {
        "sequential": loop, "reference": plain.round, "fedavg": ours.round, "fedcgnm": grouped.round
    }  # fmt: skip
    if clients <= 6 and work.hidden == SIZES["4k"]:
        uniform = Job(work, held, "fedcgnm", rate=0.6, workers=cores)
        hoo = Job(work, held, "fedcgnm", rates="fedhoo", max_rounds=10**6, stable_rounds=10**6, workers=cores)
        jobs |= {"fedcgnm_uniform": uniform.round, "fedcgnm_fedhoo": hoo.round}
    t = in_turns(jobs, repeats)
    flops = 2 * (3 * len(work.start) - FEATURES * work.hidden[0]) * len(work.y)  # inputs have no gradient
    out = {
        "clients": clients, "gigaflops": flops / t["fedavg"] / 1e9, "seconds": t,
        "first_round_seconds": {"fedavg": ours.first, "fedcgnm": grouped.first},
        "fedavg / sequential": t["fedavg"] / t["sequential"],
        "fedcgnm / fedcgnm on the reference path": t["fedcgnm"] / t["reference"],
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


def images(repeats: int, cores: int, size: int = 64, clients: int = 5, each: int = 128) -> dict[str, Any]:
    """A small CNN with FedCGNM: the reference path with one worker, and chunks with one and with every core."""
    rng = np.random.default_rng(0)
    tail = 0.7 ** np.arange(10) / (0.7 ** np.arange(10)).sum()

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, 256, size=(n, 3, size, size), dtype=np.uint8), rng.choice(10, size=n, p=tail)

    federation = Federation.from_arrays(
        [draw(each) for _ in range(clients)], draw(each), classes=list("abcdefghij"),
        transform=Transform(1 / 255, (0.5,) * 3, (0.2,) * 3),
    )  # fmt: skip
    jobs: dict[str, Callable[[], object]] = {}
    for name, path, workers in (("reference", "reference", 1), ("one", "batched", 1), ("all", "batched", cores)):
        settings = Settings.of(batch_size=32, path=path, workers=workers)
        module = build_model("small_cnn", (3, size, size), 10)
        engine = simulator(federation, module, METHODS.build("fedcgnm"), settings)
        task = Task(0, engine.model.vector.clone(), tuple(range(clients)), {"rate": np.zeros((clients, 1))}, 0.05)
        jobs[name] = partial(engine.train, task)
    t = in_turns(jobs, repeats)
    return {
        "seconds": t, "images_per_second": {k: clients * each / v for k, v in t.items()}, "cores": cores,
        "one core, times the reference path": t["reference"] / t["one"],
        "every core, times the reference path": t["reference"] / t["all"],
    }  # fmt: skip


def limits(repeats: int = 200) -> dict[str, float]:
    """What one core multiplies at best; what bfloat16 would save of a 220k step's products; and a first layer of
    one-hot columns, FedCGNM's forward pass and gradients of one batch: dense products against index sums."""
    w, a, z = torch.randn(256, 512), torch.randn(512, BATCH), torch.empty(256, BATCH)
    dense, sums = first_layer()
    return {
        "gigaflops": 2 * w.numel() * BATCH / fastest(lambda: torch.mm(w, a, out=z), repeats) / 1e9,
        "products of a 220k step, us": sum(fastest(p, repeats) for p in products(torch.float32)) * 1e6,
        "in bfloat16, us": sum(fastest(p, repeats) for p in products(torch.bfloat16)) * 1e6,
        "one-hot first layer, dense, us": fastest(dense, repeats) * 1e6,
        "as index sums, us": fastest(sums, repeats) * 1e6,
    }


def products(kind: torch.dtype) -> list[Callable[[], object]]:
    """All matrix products of a step of the 220k model, and in bfloat16 what it takes to have weights, activations and
    signals in it, and gradients out of it."""
    out: list[Callable[[], object]] = []
    widths = (FEATURES, *SIZES["220k"])
    for first, (n, m) in enumerate(pairwise(widths)):
        whole = torch.randn(m, n), torch.randn(n, BATCH), torch.randn(m, BATCH)
        w, a, d = (t.to(kind) for t in whole)
        out += [partial(torch.mm, w, a), partial(torch.mm, d, a.T)]
        if first:
            out.append(partial(torch.mm, w.T, d))
        if kind != torch.float32:
            gradient = torch.mm(d, a.T)
            out += [partial(t.copy_, f) for t, f in zip((w, a, d), whole, strict=True)]
            out.append(partial(whole[0].sub_, gradient, alpha=1e-3))
    return out


def first_layer(units: int = 256, groups: int = 2) -> tuple[Callable[[], None], Callable[[], None]]:
    """The first layer of a table of 281 columns, all but 21 of them one-hot: its outputs, and its gradients added to
    two groups' momentum; as dense products over windows of the batch, and as sums of the columns that are on."""
    pool = table(BATCH * 4, 1).pool.x[:BATCH].contiguous()
    numeric = pool.shape[1] - sum(LEVELS)
    on = pool[:, numeric:].nonzero()[:, 1].view(BATCH, -1)
    numbers, ones = pool[:, :numeric].contiguous(), on.shape[1]
    group = (torch.arange(BATCH) >= BATCH * 11 // 16).long()
    masks = torch.stack([(group == h) / BATCH for h in range(groups)])
    windows = ((0, BATCH), (BATCH // 4, BATCH))
    w, bias, d = torch.randn(units, pool.shape[1]), torch.randn(units, 1), torch.randn(units, BATCH)
    by_column, z = w.T.contiguous(), torch.empty(units, BATCH)
    momentum, turned = torch.zeros(groups, *w.shape), torch.zeros(groups, *by_column.shape)
    bag = torch.ops.aten._embedding_bag_forward_only.default
    key = (group[:, None] * sum(LEVELS) + on).flatten()
    samples, counts = torch.argsort(key, stable=True) // ones, torch.bincount(key, minlength=groups * sum(LEVELS))
    offsets, starts = counts.cumsum(0) - counts, torch.arange(0, BATCH * ones, ones)

    def dense() -> None:
        torch.addmm(bias, w, pool.T, out=z)
        for h, (low, high) in enumerate(windows):
            momentum[h].addmm_(d[:, low:high] * masks[h, low:high], pool[low:high], beta=0.5)

    def sums() -> None:
        found = bag(by_column[numeric:], on.flatten(), starts, False, 0)[0]
        torch.addmm(found.T, by_column[:numeric].T, numbers.T, out=z).add_(bias)
        gradients = bag((d / BATCH).T.contiguous(), samples, offsets, False, 0)[0].view(groups, -1, units)
        for h, (low, high) in enumerate(windows):
            turned[h, numeric:].mul_(0.5).add_(gradients[h])
            turned[h, :numeric].addmm_(numbers[low:high].T, (d[:, low:high] * masks[h, low:high]).T, beta=0.5)

    dense()
    sums()
    torch.testing.assert_close(momentum.mT, turned, rtol=1e-4, atol=1e-5)
    return dense, sums


def _resident() -> int:
    """Bytes this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    """Most bytes this process has held."""
    line = next(v for v in Path("/proc/self/status").read_text().splitlines() if v.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def tell_loop(what: str, r: dict[str, Any], losses: tuple[float, float]) -> None:
    r["losses"], t = losses, r["seconds"]
    ours = f"ours {t['fedavg'] * 1e3:.1f} ms per round, {r['gigaflops']:.0f} GFLOP/s"
    print(f"{what}: sequential loop {t['sequential'] * 1e3:.0f} ms, {ours}")
    for name in (n for n in r if "/" in n):
        print(f"   {name:40s} {r[name]:.3f}")
    print(f"   first round, in which steps are captured: {r['first_round_seconds']['fedavg']:.1f} s")
    print(f"   loss after 4 rounds: {losses[0]:.4f} sequential, {losses[1]:.4f} ours", flush=True)


def tell_peers(what: str, peers: dict[str, Any]) -> None:
    for name, value in peers.items():
        if "error" in value:
            print(f"{what} {name:8s} not measured: {value['error'].splitlines()[-1]}")
            continue
        slower = f"{value['times slower']:.1f} times slower" if "times slower" in value else ""
        print(f"{what} {name:8s} {value['seconds'] * 1e3:8.1f} ms, loss {value['loss']:.4f}  {slower}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="set up and time Flower, pfl-research and fedjax too")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], help="default: 4k, with --peers all")
    parser.add_argument("--clients", nargs="+", type=int, default=[5, 20])
    parser.add_argument("--cores", choices=["one", "all"], default="one")
    parser.add_argument("--images", action="store_true", help="a small CNN on 64-pixel images too")
    parser.add_argument("--limits", action="store_true", help="matrix products of one core, and one-hot columns")
    parser.add_argument("--rounds", type=int, default=12, help="repeats of each measurement, 3 or more")
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
    if args.limits:
        result["limits"] = limits()
        print("limits: " + ", ".join(f"{k} {v:.0f}" for k, v in result["limits"].items()))
    if args.images:
        result["images"] = r = images(args.rounds, usable_cores())
        speeds = ", ".join(f"{k} {v:.0f}" for k, v in r["images_per_second"].items())
        print(f"small_cnn, 64 pixels, 5 clients: images a second {speeds}")
        for name in (n for n in r if "times" in n):
            print(f"   {name:36s} {r[name]:.2f}")
    cores = usable_cores() if args.cores == "all" else 1
    for size in args.sizes or (SIZES if args.peers else ["4k"]):
        work = make_workload(SIZE_ROWS[size], SIZES[size])
        for clients in args.clients:
            result[f"{size} K={clients}"] = r = against_loop(work, clients, args.rounds, cores)
            tell_loop(f"{size} K={clients}", r, same_loss(work, clients, 4))
            if args.peers:
                r["peers"] = against_peers(work, clients, args.rounds, cores)
                tell_peers(f"{size} K={clients}", r["peers"])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
