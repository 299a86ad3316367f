"""The common problem of the CPU benchmarks: an Adult-sized table, MLPs of four sizes, and a plain PyTorch loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.data.federation import Federation, Samples
from fedtail.models import build_model

ROWS, NUMERIC, CATEGORIES = 32_561, 6, (7, 16, 7, 14, 6, 5, 2, 41)
FEATURES = NUMERIC + sum(CATEGORIES)
CLASSES, BATCH = 2, 64
SIZES = {"4k": (32, 16, 8), "24k": (128, 64, 32), "220k": (512, 256, 128), "2M": (1664, 832, 416)}
"""Hidden layers by the parameters they come to; the first are the paper's."""
SIZE_ROWS = {"4k": ROWS, "24k": ROWS, "220k": 8192, "2M": 4096}
"""Fewer rows where a step takes long: a round of any size takes about as long."""
SIZE_LR = {"4k": 0.1, "24k": 0.1, "220k": 0.1, "2M": 0.02}
"""At 0.1 the largest one's loss goes up and down in its first rounds, and could not tell whether work is the same."""


@dataclass(frozen=True)
class Workload:
    """Rows, labels, the order in which rows are dealt to clients, the initial model and its hidden layers."""

    x: np.ndarray
    y: np.ndarray
    order: np.ndarray
    start: np.ndarray
    hidden: tuple[int, ...] = SIZES["4k"]

    @property
    def lr(self) -> float:
        return next(SIZE_LR[size] for size, hidden in SIZES.items() if hidden == self.hidden)

    def parts(self, clients: int) -> list[np.ndarray]:
        return np.array_split(self.order, clients)

    def federation(self, clients: int, validation: float = 0.0) -> Federation:
        """The same rows at ``clients`` clients; with ``validation``, that share of each is held out."""
        train, held = [], []
        for part in self.parts(clients):
            cut = round(len(part) * validation)
            train.append(part[cut:])
            held.append(part[:cut])
        pool = Samples(torch.from_numpy(self.x), torch.from_numpy(self.y))
        names = tuple(f"client {k}" for k in range(clients))
        return Federation(pool, tuple(train), tuple(held), pool, ("no", "yes"), names, name="adult-like")

    def module(self) -> nn.Module:
        module = build_model("mlp", (FEATURES,), CLASSES, hidden=self.hidden)
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.tensor(self.start), module.parameters())
        return module

    def loss(self, vector: Tensor) -> float:
        """Mean cross-entropy of a model over all rows: what runs of the same work are compared by."""
        module = self.module()
        with torch.no_grad():
            nn.utils.vector_to_parameters(vector.clone(), module.parameters())
            return float(F.cross_entropy(module(torch.from_numpy(self.x)), torch.from_numpy(self.y)))

    def save(self, path: Path) -> None:
        what = {"x": self.x, "y": self.y, "order": self.order, "start": self.start, "hidden": np.array(self.hidden)}
        np.savez(path, **what, lr=self.lr, batch=BATCH)


def make_workload(rows: int = ROWS, hidden: tuple[int, ...] = SIZES["4k"], seed: int = 0) -> Workload:
    """Numeric and one-hot columns like the Adult table's, labels of a noisy linear rule, a quarter positive."""
    rng = np.random.default_rng(seed)
    columns = [rng.standard_normal((rows, NUMERIC))]
    for size in CATEGORIES:
        columns.append(np.eye(size)[rng.choice(size, size=rows, p=rng.dirichlet(np.ones(size)))])
    x = np.concatenate(columns, axis=1).astype(np.float32)
    score = x @ rng.standard_normal(FEATURES) + rng.standard_normal(rows)
    y = (score > np.quantile(score, 0.76)).astype(np.int64)
    module = build_model("mlp", (FEATURES,), CLASSES, hidden=hidden, seed=seed)
    start = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    return Workload(x, y, rng.permutation(rows), start, hidden)


def sequential_round(work: Workload, module: nn.Module, x: Tensor, clients: int, rng: np.random.Generator) -> Tensor:
    """One FedAvg round as anybody would write it: client after client, an epoch of torch.optim.SGD each."""
    data, labels = torch.from_numpy(work.x), torch.from_numpy(work.y)
    total = torch.zeros_like(x)
    for part in work.parts(clients):
        with torch.no_grad():
            nn.utils.vector_to_parameters(x.clone(), module.parameters())  # parameters become views of it
        optimizer = torch.optim.SGD(module.parameters(), lr=work.lr)
        order = torch.from_numpy(rng.permutation(part))
        for i in range(0, len(order), BATCH):
            batch = order[i : i + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(module(data[batch]), labels[batch]).backward()
            optimizer.step()
        total += len(part) / len(work.y) * nn.utils.parameters_to_vector(module.parameters()).detach()
    return total


def fastest(work: Callable[[], object], repeats: int, warm: int = 1) -> float:
    """Least wall-clock seconds of a call: what it takes when nothing else disturbs it."""
    for _ in range(warm):
        work()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
