"""Logistic regression as on pooled samples, by L-BFGS from sums of gradients: a head on frozen features at its best.

    g(x) = (1/n) sum_i w_{y_i} grad CE_i(x)     the sum over all samples of all sites; w_c = (n / (C n_c))^power
    x   <- x - H (g(x) + ridge_t x)             H from the last pairs (x' - x, g' - g), whose g' - g gets ridge_t s

In a round every site takes one plain step of length 1 with all its samples, so that the mean of the updates is -g(x),
whatever the partition; the server, or each site for itself, moves on (Liu and Nocedal, Mathematical Programming 45,
1989). The first round, from a head of zeros, has no weights: its gradient in the biases, 1/C - n_c / n, tells them.
Steps need no line search: the loss is convex, so a step too long leaves a pair that shortens the next.

The ridge is ``strongest`` for a quarter of the rounds, which noisy labels want, and falls by a constant factor to
``weakest``; validation keeps the round with the lowest log loss. A pair holds for every ridge. Sums of products are
rounded once, after the last term, which makes them the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import FedtailError, check_range
from fedtail.methods.base import Batch, LocalRun, Method, Server, cross_entropy, pick
from fedtail.methods.registry import METHODS
from fedtail.methods.weighted_ce import inverse_frequency

PAIRS = 20
"""Pairs that are kept."""
HOLD = 0.25
"""Share of the rounds at the strongest ridge."""
NOBODY = 1e-6
"""A class with a smaller share has no samples: updates may be rounded to fixed point."""


@METHODS.add("logistic", apart=True)
@dataclass(frozen=True)
class Logistic(Method):
    """Only for a linear head; needs neither learning rate nor batches, and only sums of updates."""

    title = "Logistic regression"
    paper = "Liu and Nocedal, On the Limited Memory BFGS Method for Large Scale Optimization, 1989"
    wire = "nothing (a weight per class comes down)"
    plain_steps = "a step is the gradient over all samples"
    compares_by = "log_loss"
    fixed: ClassVar[Mapping[str, Any]] = {
        "local.batch_size": 1_000_000,
        "local.epochs": 1,
        "local.lr": 1.0,
        "local.optimizer": "sgd",
        "local.schedule": "constant",
        "local.warmup": 0,
        "rates.name": "uniform",
        "rates.rate": 0.0,
        "run.participation": 1.0,
        "run.quorum": 1.0,
        "server.aggregate": "mean",
        "server.optimizer": "none",
    }

    power: float = 1.0
    """Of the inverse class shares as weights: 1 gives every class the same mass, 0 every sample."""
    strongest: float = 1.0
    """Ridge of the first step."""
    weakest: float = 0.001
    """Ridge of the last step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise FedtailError(
                "method.weight_decay has no effect on method 'logistic', which has a ridge; leave it out, or set "
                "method.strongest and method.weakest"
            )
        check_range("method.power", self.power, 0.0)
        check_range("method.strongest", self.strongest, 0.0, open_low=True)
        check_range("method.weakest", self.weakest, 0.0, self.strongest, open_low=True)

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        return {"class_weight": run.message["class_weight"]}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        return pick(const["class_weight"], batch.y) * cross_entropy(logits, batch.y), state

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"class_weight": torch.ones(n_classes)}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"class_weight": state["class_weight"]}

    def advance(self, server: Server, aggregate: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        x, gradient = server.x.double(), server.x.double() - aggregate.double()
        if server.round == 0:
            return server.x, {"class_weight": self._class_weights(server, aggregate)}
        pairs = torch.stack([x, gradient])[None]
        if "last" in state:
            pairs = torch.cat([state["pairs"], pairs - state["last"]])
            if dot(*pairs[-1]) <= 0:
                pairs = pairs[:-1]
            pairs = pairs[-PAIRS:]
        else:
            pairs = pairs[:0]
        ridge = self.ridge(server.round, server.rounds)
        width = x.numel() / server.n_classes
        step = lbfgs_step(gradient + ridge * x, [(s, y + ridge * s) for s, y in pairs], 1 / (width / 2 + ridge))
        kept = {"last": torch.stack([x, gradient]), "pairs": pairs}
        return (x - step).to(server.x.dtype), {"class_weight": state["class_weight"], **kept}

    def ridge(self, t: int, rounds: int) -> float:
        """The ridge of round t, from 1 on."""
        held = int(HOLD * rounds)
        done = max(t - 1 - held, 0) / max(rounds - 2 - held, 1)
        return self.strongest * (self.weakest / self.strongest) ** done

    def _class_weights(self, server: Server, aggregate: Tensor) -> Tensor:
        """(C,) from the first round's gradient in the biases."""
        if bool(server.x.any()) or server.x.numel() % server.n_classes:
            raise FedtailError(
                "method 'logistic' trains a linear head from zero; use it with an encoder (model.encoder) and "
                "model.name = 'linear', or choose another method"
            )
        share = 1 / server.n_classes + server.classifier(aggregate)[1].double()
        found = inverse_frequency(torch.where(share > NOBODY, share, 0.0).numpy(), self.power)
        return torch.as_tensor(found, dtype=torch.float32)


def lbfgs_step(gradient: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], first: float) -> Tensor:
    """The inverse Hessian that ``pairs`` of moves and changes of the gradient tell of, the latest last, times the
    gradient; ``first`` times the gradient where there are none."""
    found, factors = gradient, []
    for s, y in reversed(pairs):
        scale = 1 / dot(s, y)
        factors.append((s, y, scale, scale * dot(s, found)))
        found = found - factors[-1][3] * y
    found = found * (first if not pairs else dot(*pairs[-1]) / dot(pairs[-1][1], pairs[-1][1]))
    for s, y, scale, factor in reversed(factors):
        found = found + (factor - scale * dot(y, found)) * s
    return found


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product, rounded once."""
    return math.fsum((a * b).tolist())
