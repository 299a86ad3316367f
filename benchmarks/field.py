"""The speed benchmarks of other simulators' authors, in their own shape.

python benchmarks/field.py cifar10                     # pfl-research's CIFAR-10 IID: 1,000 users, 50 a round, batch 10
python benchmarks/field.py emnist                      # fedjax's EMNIST: 3,400 users, 10 a round, batch 10
python benchmarks/field.py cifar10 --device cuda --peers pfl:1 pfl:4
python benchmarks/field.py emnist --peers loop fedjax:1 fedjax:2 pfl:1 pfl:2

Both train the same network, two convolutions and two dense layers with dropout, one local epoch. Images are noise: what
is timed does not depend on them. ``loop`` is a plain PyTorch loop over users. A peer, ``name:processes`` (pfl, fedjax,
fedlab, fedml, flower), runs in an environment of its own (``other_simulators``) on the same images and users; on a CPU
fedjax takes processes as threads, and fedlab and fedml have but one. Ours is timed before and after the others, so that
drifts of the machine show. ``--clock cpu`` counts the processor seconds of the one process, which other work on the
machine leaves alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedtail.data.federation import Federation, Samples
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from other_simulators import run_peer
from peers.clock import now
from peers.networks import cnn

BATCH = 10
WARM = {"cpu": 1, "cuda": 3}
"""Rounds before the clock starts: graphs are recorded in the first on a GPU."""


@dataclass(frozen=True)
class Shape:
    """Users, users of a round, images of a user, classes, (channels, side) and the learning rate."""

    users: int
    cohort: int
    samples: int
    classes: int
    image: tuple[int, int]
    lr: float


SHAPES = {
    "cifar10": Shape(users=1000, cohort=50, samples=50, classes=10, image=(3, 32), lr=0.02),
    "emnist": Shape(users=3400, cohort=10, samples=200, classes=62, image=(1, 28), lr=0.01),
}
"""pfl-research's ``benchmarks/image_classification`` (IID, cohort of 50), and fedjax's ``EMNIST_CONV``, whose users
have some 200 images each; here all have as many. pfl-research's own learning rate, .1, is for photos: on these images
plain FedAvg swings with it, in whatever program, and in some runs has blown up within 14 rounds."""


def network(shape: Shape) -> nn.Sequential:
    """The CNN of both."""
    torch.manual_seed(0)
    return cnn(*shape.image, shape.classes)


def images(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around a colour of each class, so that losses fall; as many as a few rounds need."""
    rng = torch.Generator().manual_seed(0)
    channels, side = shape.image
    n = min(shape.users * shape.samples, 50_000)
    y = torch.randint(0, shape.classes, (n,), generator=rng)
    centres = torch.randn(shape.classes, channels, 1, 1, generator=rng)
    return torch.randn(n, channels, side, side, generator=rng) * 0.5 + centres[y], y


def parts(shape: Shape, n: int) -> list[np.ndarray]:
    """Images of each user; where there are fewer than users times samples, users share some."""
    order = np.random.default_rng(0).permutation(n)
    return [np.take(order, range(k * shape.samples, (k + 1) * shape.samples), mode="wrap") for k in range(shape.users)]


def ours(shape: Shape, rounds: int, device: str, workers: int | str = "auto") -> list[float]:
    """Seconds of each round."""
    x, y = images(shape)
    pool = Samples(x, y)
    empty = np.zeros(0, dtype=np.int64)
    users = tuple(parts(shape, len(y)))
    federation = Federation(
        pool,
        users,
        (empty,) * len(users),
        Samples(x[:100], y[:100]),
        tuple(str(c) for c in range(shape.classes)),
        tuple(f"user {k}" for k in range(len(users))),
        name="noise",
    )
    common = {"batch_size": BATCH, "lr": shape.lr, "schedule": "constant", "device": device, "rounds": rounds}
    common |= {"participation": shape.cohort / shape.users, "workers": workers}
    settings = Settings.of(**common, evaluate_every=10**6, validate_every=0, diagnostics=())
    rates = RATES.build("uniform", len(users), rate=0.0)
    problem = assemble(federation, network(shape), METHODS.build("fedavg"), rates, settings)
    times: list[float] = []
    state = train_rounds(problem, settings, problem.begin(), lambda *_: times.append(now()))
    assert torch.isfinite(state.x).all()
    print(json.dumps(problem.engine.info()), flush=True)
    problem.engine.close()
    return np.diff(times)[:-1].tolist()  # the last one is evaluated


def loop(shape: Shape, rounds: int, device: str) -> list[float]:
    """The same rounds as anybody would write them: user after user, ``torch.optim.SGD``."""
    x, y = (t.to(device) for t in images(shape))
    users, rng = parts(shape, len(y)), np.random.default_rng(1)
    net = network(shape).to(device)
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    took = []
    for _ in range(rounds):
        began, total = now(), torch.zeros_like(start)
        for k in rng.choice(len(users), shape.cohort, replace=False):
            nn.utils.vector_to_parameters(start.clone(), net.parameters())
            optimizer = torch.optim.SGD(net.parameters(), lr=shape.lr)
            for batch in torch.from_numpy(rng.permutation(users[k])).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
            total += nn.utils.parameters_to_vector(net.parameters()).detach() / shape.cohort
        start = total
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(now() - began)
    if not torch.isfinite(start).all():
        raise RuntimeError("its rounds end at a model that is not finite")
    return took


def peer(name: str, shape: Shape, rounds: int, device: str) -> list[float]:
    """Seconds of each round of ``pfl:2``, say."""
    kind, _, processes = name.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        x, y = images(shape)
        order = np.concatenate(parts(shape, len(y)))
        np.savez(problem, x=x.numpy(), y=y.numpy(), order=order, lr=shape.lr, batch=BATCH)
        found = run_peer(kind, problem, shape.users, shape.cohort, rounds, int(processes or 1), device)
    if not np.isfinite(found["loss"]):
        raise RuntimeError(f"its rounds end at a loss of {found['loss']}")
    return list(found["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", choices=WARM, default="cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--peers", nargs="*", default=["loop"])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    shape, warm = SHAPES[given.shape], WARM[given.device]
    rounds = given.rounds + warm + 2
    if given.device == "cpu":
        torch.set_num_threads(1)
    os.environ["BENCHMARK_CLOCK"] = given.clock
    workers = 1 if given.clock == "cpu" else "auto"
    first, seconds = ours(shape, rounds, given.device, workers), {}
    print(f"{given.shape}: fedtail {min(first[warm:]):.4f} s a round", flush=True)
    for name in given.peers:
        try:
            run = loop if name == "loop" else lambda *a, name=name: peer(name, *a)
            seconds[name] = run(shape, rounds, given.device)
            print(f"{given.shape}: {name} {min(seconds[name][warm:]):.4f} s a round", flush=True)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            print(f"{name}: {error}", flush=True)
    again = ours(shape, rounds, given.device, workers) if given.clock == "wall" else first
    told: dict[str, Any] = {
        "fedtail": min(first[warm:] + again[warm:]),
        "fedtail, median": float(np.median(again[warm:])),
    }
    print(f"{given.shape}: fedtail {told['fedtail']:.4f} s a round (median {told['fedtail, median']:.4f})")
    for name, each in seconds.items():
        told[name] = min(each[warm:])
        print(f"{given.shape}: {name} {told[name]:.4f} s a round, {told[name] / told['fedtail']:.2f} times as long")
    if given.out is not None:
        given.out.write_text(json.dumps({"shape": given.shape, "device": given.device, "seconds": told}, indent=1))


if __name__ == "__main__":
    main()
