"""GPU simulator against an eager loop and against the large-batch ceiling, and tables against an eager loop; all
figures from one run.

    python benchmarks/gpu.py [--clients 5] [--batch 32 64 128] [--ceiling 1024] [--tables] [--out gpu.json]

Data have the shape and the class sizes of CIFAR-10-LT (imbalance 20) and random pixels: speed does not depend on
them. Images are original images times their replication; filling counts as time, not as images.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedtail.core.records import Task
from fedtail.core.resampling import resampled_counts
from fedtail.data.federation import Federation, Samples, Transform, assemble
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator

SIZES = [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]
RATE = 0.6


def federation(clients: int, shrink: int = 1) -> Federation:
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat(np.arange(10), [n // shrink for n in SIZES]))

    def pixels(n: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, size=(n, 3, 32, 32), dtype=np.uint8))

    test = Samples(pixels(10_000 // shrink), torch.from_numpy(rng.integers(0, 10, size=10_000 // shrink)))
    return assemble(
        Samples(pixels(len(y)), torch.from_numpy(y)), np.array_split(np.arange(len(y)), clients), test,
        classes=[str(c) for c in range(10)], validation=0.1, augment="crop-flip",
        transform=Transform(1 / 255, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    )  # fmt: skip


def model(width: int) -> torch.nn.Module:
    return build_model("resnet18", (3, 32, 32), 10, width=width, norm_groups=min(32, width))


def flops_per_image(width: int) -> float:
    """Of one forward and backward pass."""
    module = model(width)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, 32, 32)).sum().backward()
    return float(counter.get_total_flops())


def task(engine: Any, round: int = 0) -> Task:
    clients = tuple(range(engine.n_clients))
    return Task(round, engine.model.vector.clone(), clients, {"rate": np.full((len(clients), 1), RATE)}, 0.05)


def images(updates: Any, data: Federation, rate: float) -> int:
    return sum(int(resampled_counts(data.client(u.client).counts, rate).sum()) for u in updates)


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    out = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, out


def eager(data: Federation, batch: int, device: str, width: int, steps: int = 6) -> float:
    """Images per second of the plain loop over clients and groups, on the first ``steps`` batches of each client."""
    short = replace(data, train=tuple(i[: batch * steps] for i in data.train))
    engine = ReferenceSimulator(
        short, model(width), METHODS.build("fedcgnm"), Settings.of(batch_size=batch, device=device)
    )
    work = replace(task(engine), probes={"rate": np.zeros((engine.n_clients, 1))})
    timed(lambda: engine.train(work), device)
    seconds, _ = timed(lambda: engine.train(work), device)
    return sum(len(i) for i in short.train) / seconds


def simulated(
    data: Federation, batch: int, device: str, width: int, rounds: int = 3, **options: Any
) -> tuple[dict[str, Any], GraphSimulator]:
    """Images per second of FedCGNM rounds on the graph path once their shapes are recorded (median of ``rounds``),
    and what the first round cost."""
    settings = Settings.of(batch_size=batch, device=device)
    engine = GraphSimulator(data, model(width), METHODS.build("fedcgnm"), settings, **options)
    first, (updates, _) = timed(lambda: engine.train(task(engine)), device)
    for _ in range(2):
        seconds = [timed(lambda r=r: engine.train(task(engine, r)), device)[0] for r in range(rounds)]
    again, _ = engine.train(task(engine))
    same = all(torch.equal(a.delta, b.delta) for a, b in zip(updates, again, strict=True))
    n = images(updates, data, RATE)
    typical = float(np.median(seconds))
    out = {
        "images_per_second": n / typical, "round_seconds": typical, "first_round_seconds": first, "images": n,
        "bitwise_repeatable": same, "loss": float(np.mean([u.loss[0] for u in updates])), **engine.info(),
    }  # fmt: skip
    return out, engine


def whole_rounds(data: Federation, rates: str, batch: int, device: str, width: int, rounds: int) -> float:
    """Median seconds of a round of the loop, with evaluation; the first two (warm-up) are left out."""
    from fedtail.rounds.loop import train_rounds
    from fedtail.runs.build import assemble as assemble_problem

    strategy = RATES.build(rates, data.n_clients, **({"rate": RATE} if rates == "uniform" else {}))
    problem = assemble_problem(
        data, model(width), METHODS.build("fedcgnm"), strategy,
        Settings.of(batch_size=batch, path="graph", device=device),
    )  # fmt: skip
    marks = [time.perf_counter()]
    train_rounds(
        problem, Settings.of(rounds=rounds, lr=0.05), problem.begin(), lambda *_: marks.append(time.perf_counter())
    )
    problem.engine.close()
    return float(np.median(np.diff(marks)[2:]))


def table(clients: int, rows: int, features: int, classes: int) -> Federation:
    """Random rows in the shape of a tabular data set, classes long-tailed."""
    rng = np.random.default_rng(0)
    p = np.geomspace(1, 0.05, classes)
    parts = [
        (rng.normal(size=(n, features)).astype(np.float32), rng.choice(classes, n, p=p / p.sum()))
        for n in [rows // clients] * clients + [2000]
    ]
    return Federation.from_arrays(parts[:-1], parts[-1], classes=[str(c) for c in range(classes)], validation=0.1)


TABLES = {
    "Adult-sized, MLP": ("mlp", 30_000, 105, 2),
    "UNSW-sized, MLP": ("mlp", 60_000, 196, 10),
    "UNSW-sized, CNN-LSTM": ("cnn_lstm", 60_000, 196, 10),
}
"""Model, rows, features and classes."""


def on_table(what: str, clients: int, device: str, *, fast: bool, shrink: int = 1) -> dict[str, Any]:
    """A round of FedCGNM in batches of 64: seconds once its shapes are recorded, of the first, of a test."""
    name, rows, features, classes = TABLES[what]
    data = table(clients, rows // shrink, features, classes)
    settings = Settings.of(batch_size=64, device=device, path="auto" if fast else "reference")
    engine = simulator(data, build_model(name, (features,), classes), METHODS.build("fedcgnm"), settings)
    first, (updates, _) = timed(lambda: engine.train(task(engine)), device)
    seconds = [timed(lambda r=r: engine.train(task(engine, r)), device)[0] for r in range(4)] if fast else [first]
    test = min(timed(lambda: engine.confusion(engine.model.vector, "test"), device)[0] for _ in range(2))
    typical, n = float(np.median(seconds)), images(updates, data, RATE)
    out = {
        "round_seconds": typical, "first_round_seconds": first, "test_seconds": test, "samples": n,
        "samples_per_second": n / typical, **engine.info(), "steps": max(u.steps[0] for u in updates),
    }  # fmt: skip
    engine.close()
    return out


def ceiling(batch: int, device: str, width: int, repeat: int = 20) -> float:
    """Images per second of one compiled model in large batches: bf16 autocast, channels-last, plain SGD, recorded."""
    module = model(width).to(device).to(memory_format=torch.channels_last)
    params = list(module.parameters())
    x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device=device)
    compiled = torch.compile(module, dynamic=False) if device == "cuda" else module

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(compiled(x).float(), y)
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=-0.01)

    if device != "cuda":
        step()
        return batch / timed(step, device)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        step()
        graph.capture_end()
    graph.replay()
    seconds, _ = timed(lambda: [graph.replay() for _ in range(repeat)], device)
    return batch * repeat / seconds


def agreement(
    data: Federation, width: int, device: str, precisions: Sequence[str], batch: int = 128
) -> dict[str, float]:
    """||fast - reference|| / ||reference|| of a client's update over a whole local epoch, in each precision; and, as
    a yardstick, of the reference itself when PyTorch's default TF32 convolutions are allowed.

    From a model three rounds old and at a small learning rate: in its first steps a fresh network amplifies any
    rounding, and a comparison there says nothing.
    """
    method, settings = METHODS.build("fedcgnm"), Settings.of(batch_size=batch, device=device)
    start = GraphSimulator(data, model(width), method, settings)
    x = start.model.vector.clone()
    for r in range(3):
        deltas = [u.delta[0] for u in start.train(replace(task(start, r), x=x))[0]]
        x = x + torch.stack(deltas).mean(0)
    start.close()
    work = Task(3, x, (0,), {"rate": np.full((1, 1), RATE)}, 0.002)

    def update(engine: Any) -> torch.Tensor:
        return engine.train(work)[0][0].delta.double()

    reference = ReferenceSimulator(data, model(width), method, settings)
    torch.backends.cudnn.allow_tf32 = True
    plain_tf32 = update(reference)
    torch.backends.cudnn.allow_tf32 = False
    expected = update(reference)
    out = {"reference in tf32": float((plain_tf32 - expected).norm() / expected.norm())}
    for precision in precisions:
        fast = GraphSimulator(
            data, model(width), method, Settings.of(batch_size=batch, device=device, precision=precision)
        )
        out[precision] = float((update(fast) - expected).norm() / expected.norm())
        fast.close()
    return out


def profile(engine: GraphSimulator) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as trace:
        engine.train(task(engine))
    print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=80))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=[32, 64, 128])
    parser.add_argument("--ceiling", type=int, nargs="*", default=[1024])
    parser.add_argument("--library", action="store_true", help="without kernels of our own")
    parser.add_argument("--tables", action="store_true", help="small models and the CNN-LSTM as well")
    parser.add_argument("--lanes", type=int, nargs="*", default=[None])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=64, help="of the ResNet; smaller only to try the script")
    parser.add_argument("--shrink", type=int, default=1, help="divide the data, only to try the script")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the loop; 0 leaves the comparison out")
    parser.add_argument("--skip-agreement", action="store_true")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "tf32", "bf16"], help="of the agreement")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    data = federation(args.clients, args.shrink)
    flops = flops_per_image(args.width)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "gflop_per_image": flops / 1e9}

    def keep(what: str, value: Any) -> Any:
        result[what] = value
        if args.out:
            args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
        return value

    def line(what: str, rate: float, note: str = "") -> None:
        print(f"{what:44} {rate:10,.0f} images/s {rate * flops / 1e12:8.1f} TFLOP/s  {note}", flush=True)

    print(f"ResNet-18-GN on {name}, {args.clients} clients, FedCGNM with 2 groups, {flops / 1e9:.2f} GFLOP per image")
    for batch in args.batch:
        for lanes in args.lanes:
            got, engine = simulated(data, batch, args.device, args.width, lanes=lanes, kernels=not args.library)
            keep(f"graph_{batch}" + (f"_lanes{lanes}" if lanes else ""), got)
            line(
                f"graph path, batch {batch}", got["images_per_second"],
                f"round {got['round_seconds']:.2f} s, first {got['first_round_seconds']:.1f} s, {got['lanes']} lanes, "
                f"{got['recorded_passes']} graphs in {got['recording_seconds']:.1f} s, repeatable "
                f"{got['bitwise_repeatable']}, loss {got['loss']:.3f}",
            )  # fmt: skip
            if args.profile:
                profile(engine)
            engine.close()
    for batch in args.ceiling:
        line(
            f"ceiling: one compiled model, batch {batch}",
            keep(f"ceiling_{batch}", ceiling(batch, args.device, args.width)),
        )
    for what in TABLES if args.tables else ():
        for clients in (5, 50):
            fast = keep(f"{what}, K={clients}", on_table(what, clients, args.device, fast=True, shrink=args.shrink))
            print(
                f"{what}, K = {clients}: round {fast['round_seconds'] * 1e3:.0f} ms ({fast['steps']} steps), "
                f"first {fast['first_round_seconds']:.1f} s, {fast['samples_per_second']:,.0f} samples/s", flush=True,
            )  # fmt: skip
    if args.tables:
        what = next(iter(TABLES))
        slow = keep(f"{what}, eager", on_table(what, 5, args.device, fast=False, shrink=args.shrink))
        print(f"{what}, K = 5, eager loop: round {slow['round_seconds'] * 1e3:.0f} ms", flush=True)
    line(f"eager loop, batch {args.batch[0]}", keep("eager", eager(data, args.batch[0], args.device, args.width)))
    top = max((result[f"ceiling_{b}"] for b in args.ceiling), default=None)
    for batch in args.batch:
        rate = max(v["images_per_second"] for k, v in result.items() if k.startswith(f"graph_{batch}"))
        share = "" if top is None else f", {rate / top:.0%} of the ceiling"
        print(f"batch {batch}: {rate / result['eager']:.1f} times the eager loop{share}", flush=True)
    if args.rounds:
        for rates in ("uniform", "fedhoo"):
            seconds = whole_rounds(data, rates, args.batch[0], args.device, args.width, args.rounds)
            print(f"round of the loop, {rates:8} {keep(f'round_{rates}', seconds):.3f} s", flush=True)
        print(f"FedHOO / uniform: {result['round_fedhoo'] / result['round_uniform']:.2f} (at most 2.5)", flush=True)
    if not args.skip_agreement:
        keep("agreement", agreement(data, args.width, args.device, args.precisions))
        print("relative difference from the reference after a local epoch:", result["agreement"], flush=True)


if __name__ == "__main__":
    main()
