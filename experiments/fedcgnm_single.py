"""FedCGNM and FedHOO in one file that needs numpy, torch and scikit-learn: to read, and to copy from.

python fedcgnm_single.py            # five clients with long-tailed digits; FedHOO searches their resampling rates
python fedcgnm_single.py 0.6        # one fixed rate instead

The same algorithm as ``fedtail run --rates fedhoo`` with every default and nothing else: no other method, no other
engine, no files. A test trains both on the same data and compares models and rates.
"""

from __future__ import annotations

import math
import sys
import zlib
from itertools import product

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

Rows = tuple[torch.Tensor, torch.Tensor]


def generator(seed: int, purpose: str, client: int = 0, round: int = 0) -> np.random.Generator:
    """Every draw is keyed by what it is for, so that the order in which clients run does not matter."""
    key = (seed, zlib.crc32(purpose.encode()), client, round)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


# -- resampling: class c is replicated by (largest / own size) ** rate -------------------------------------------


def copies(counts: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """How often every sample of a class appears in an epoch, and how many of the class once more."""
    factor = np.where(counts > 0, (counts.max() / np.maximum(counts, 1)) ** rate, 0.0)
    whole = np.floor(factor).astype(np.int64)
    return whole, np.rint(counts * (factor - whole)).astype(np.int64)


def epoch(y: np.ndarray, n_classes: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Positions of one resampled epoch, in random order."""
    counts = np.bincount(y, minlength=n_classes)
    whole, extra = copies(counts, rate)
    if not extra.any() and whole.max() <= 1:
        index = np.arange(len(y))
    else:
        ranked = np.argsort(y + rng.random(len(y)))
        of = y[ranked]
        rank = np.arange(len(y)) - (np.cumsum(counts) - counts)[of]
        index = np.repeat(ranked, whole[of] + (rank < extra[of]))
    rng.shuffle(index)
    return index


# -- FedCGNM: one normalized momentum per group of classes -------------------------------------------------------


def two_groups(counts: np.ndarray) -> np.ndarray:
    """0 for the frequent classes and 1 for the rare: the cut with the least scatter within both groups."""
    groups = np.ones(len(counts), dtype=np.int64)
    order = np.lexsort((np.arange(len(counts)), -counts))
    order = order[counts[order] > 0]
    n = len(order)
    if n <= 2:
        groups[order] = np.arange(n)
        return groups
    v = np.round(counts[order] / counts[order[0]], 12)
    cost = np.array([v[:i].var() * i + v[i:].var() * (n - i) for i in range(1, n)])
    tied = np.flatnonzero(cost <= cost.min() + 1e-12) + 1
    cut = max(tied, key=lambda i: (-(i**2 + (n - i) ** 2), i))  # the most even sizes, then the fewest rare classes
    groups[order[:cut]] = 0
    return groups


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def load(model: nn.Module, x: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(x.clone(), model.parameters())


def local_run(
    model: nn.Module, x0: torch.Tensor, rows: Rows, n_classes: int, rate: float, lr: float, rng: np.random.Generator,
    batch: int = 64, beta: float = 0.5, delta: float = 0.1,
) -> torch.Tensor:  # fmt: skip
    """One client's epoch: m_h <- beta m_h + (1 - beta) g_h,  x <- x - lr sum_h m_h / (|m_h| + delta)."""
    x, momentum = x0.clone(), torch.zeros(2, len(x0))
    y = rows[1].numpy()
    whole, extra = copies(counts := np.bincount(y, minlength=n_classes), rate)
    groups = torch.as_tensor(two_groups(counts * whole + extra))
    order = epoch(y, n_classes, rate, rng)
    for index in np.array_split(order, range(batch, len(order), batch)):
        load(model, x)
        target = rows[1][index]
        losses = F.cross_entropy(model(rows[0][index]), target, reduction="none")
        for h in (0, 1):
            loss = (losses * (groups[target] == h)).sum() / len(index)
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=h == 0)
            momentum[h] = beta * momentum[h] + (1 - beta) * torch.cat([g.reshape(-1) for g in grads])
        size = momentum.norm(dim=1, keepdim=True) + delta
        x = x - lr * (momentum / size).sum(0)
    return x - x0


# -- FedHOO: a tree of boxes of rates, of which each round compares 2^K corners ----------------------------------


class FedHOO:
    """Rates (K,) in [low, high]; a round asks for two per client, and is told a reward for each combination."""

    cold, max_depth, stable, limit = 3, 5, 5, 30

    def __init__(self, n: int, low: float = 0.4, high: float = 0.8) -> None:
        self.n, self.round, self.node, self.streak, self.done = n, 0, 0, 0, False
        self.low, self.high = [np.full(n, low)], [np.full(n, high)]
        self.depth, self.parent, self.children = [0], [-1], [[]]  # type: list[int], list[int], list[list[int]]
        self.value, self.visits, self.score = [0.0], [0.0], [math.inf]
        self.cells: list[int] = []
        self.rates = (self.low[0] + self.high[0]) / 2

    def ask(self) -> np.ndarray:
        """(K, 2) quarter points of the box, or (K, 1) once the rates are settled."""
        if self.done:
            return self.rates[:, None]
        low, high = self.low[self.node], self.high[self.node]
        return np.stack([(3 * low + high) / 4, (low + 3 * high) / 4], axis=1)

    def tell(self, rewards: np.ndarray) -> int:
        """The winner s; bit k of it is client k's choice."""
        winner = int(np.argmax(rewards))
        self.rates = self.ask()[np.arange(self.n), winner >> np.arange(self.n) & 1]
        self._count_stable()
        if self.round >= self.cold:  # a model that has learnt nothing yet would steer the tree for good
            self._learn(rewards)
        self.round += 1
        self.done = self.streak >= self.stable or self.round >= self.limit
        leaves = [i for i, below in enumerate(self.children) if not below]
        self.node = max(leaves, key=lambda i: (self.score[i], -i))
        return winner

    def _count_stable(self) -> None:
        if self.round < self.cold or self.depth[self.node] < self.max_depth - 1:
            self.cells, self.streak = [], 0
            return
        width = self.high[0] - self.low[0]
        cells = np.floor((self.rates - self.low[0]) / width * 2**self.max_depth).astype(int).tolist()
        self.streak = self.streak + 1 if cells == self.cells else 1
        self.cells = cells

    def _learn(self, rewards: np.ndarray) -> None:
        node = self.node
        if self.depth[node] < self.max_depth:
            middle = (self.low[node] + self.high[node]) / 2
            for s, reward in enumerate(rewards):
                upper = (s >> np.arange(self.n) & 1).astype(bool)
                self.low.append(np.where(upper, middle, self.low[node]))
                self.high.append(np.where(upper, self.high[node], middle))
                value = (self.value[node] + reward) / 2 if self.visits[node] else float(reward)
                self.children[node].append(len(self.depth))
                self.depth.append(self.depth[node] + 1)
                self.parent.append(node)
                self.children.append([])
                self.value.append(value)
                self.visits.append(1.0)
                self.score.append(value)
        box = node
        while box >= 0:
            self.value[box] += (0.5 if self.visits[box] else 1.0) * (rewards.mean() - self.value[box])
            self.visits[box] += 2.0**self.n
            spread = math.sqrt(math.log(self.round + 1) / max(self.visits[box], 1))
            self.score[box] = self.value[box] + 0.01 * 2.0 ** -self.depth[box] + spread
            box = self.parent[box]


# -- the rounds ---------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, clients: list[Rows], validation: Rows, n_classes: int, search: FedHOO | None = None,
    rate: float = 0.6, rounds: int = 50, lr: float = 0.4, batch: int = 32, seed: int = 0,
) -> tuple[torch.Tensor, list[list[float]]]:  # fmt: skip
    """The final model as a vector, and the rates in force in every round."""
    x, path = vector(model), []
    p = np.array([len(y) for _, y in clients]) / sum(len(y) for _, y in clients)
    end = min(1e-4, lr)
    for t in range(rounds):
        step = end + 0.5 * (lr - end) * (1 + math.cos(math.pi * t / max(rounds - 1, 1)))
        asked = np.full((len(clients), 1), rate) if search is None else search.ask()
        deltas = [
            [local_run(model, x, rows, n_classes, float(r), step, generator(seed, "batches", k, t), batch) for r in own]
            for k, (rows, own) in enumerate(zip(clients, asked, strict=True))
        ]

        choices = [bits[::-1] for bits in product(range(asked.shape[1]), repeat=len(clients))]
        chosen = choices[0]
        if search is not None and not search.done:
            chosen = choices[
                search.tell(np.array([accuracy(model, combine(x, p, deltas, c), validation) for c in choices]))
            ]
        x = combine(x, p, deltas, chosen)
        path.append([float(own[c]) for own, c in zip(asked, chosen, strict=True)])
    load(model, x)
    return x, path


def combine(x: torch.Tensor, p: np.ndarray, deltas: list[list[torch.Tensor]], choice: tuple[int, ...]) -> torch.Tensor:
    """x + sum_k p_k delta_k, each client with its chosen run."""
    total = x.double()
    for a, runs, c in zip(p, deltas, choice, strict=True):
        total = total + float(a) * runs[c].double()
    return total.float()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, rows: Rows) -> float:
    load(model, x)
    return float((model(rows[0]).argmax(1) == rows[1]).double().mean())


def network(n_inputs: int, n_classes: int, hidden: tuple[int, ...] = (32, 16, 8)) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for n, units in zip((n_inputs, *hidden), hidden, strict=False):
        layers += [nn.Linear(n, units), nn.GroupNorm(1, units), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], n_classes))


def digits(n_clients: int = 5, imbalance: float = 20.0, seed: int = 0) -> tuple[list[Rows], Rows, Rows]:
    """Clients' training rows, all validation rows, and a test set; class c has 20^(-c/9) times as many rows as 0."""
    rng, (x, y) = np.random.default_rng(seed), load_digits(return_X_y=True)
    order = rng.permutation(len(y))
    test, rest = order[:540], order[540:]
    kept = [np.flatnonzero(y[rest] == c)[: max(2, round(110 * imbalance ** (-c / 9)))] for c in range(10)]
    train_rows = rest[np.concatenate(kept)]
    owner = rng.integers(0, n_clients, len(train_rows))
    held = rng.random(len(train_rows)) < 0.1

    def rows(index: np.ndarray) -> Rows:
        return torch.as_tensor(x[index] / 16, dtype=torch.float32), torch.as_tensor(y[index])

    return [rows(train_rows[(owner == k) & ~held]) for k in range(n_clients)], rows(train_rows[held]), rows(test)


if __name__ == "__main__":
    torch.manual_seed(0)
    data, held_out, unseen = digits()
    net, searching = network(64, 10), None if len(sys.argv) > 1 else FedHOO(len(data))
    final, rates = train(net, data, held_out, 10, searching, rate=float(sys.argv[1]) if len(sys.argv) > 1 else 0.6)
    answers = net(unseen[0]).argmax(1)
    recalls = [float((answers[unseen[1] == c] == c).float().mean()) for c in range(10)]
    print(f"rates {np.round(rates[-1], 3).tolist()}")
    print(f"accuracy {accuracy(net, final, unseen):.3f}; recall of digits 0 to 9: {np.round(recalls, 2).tolist()}")
