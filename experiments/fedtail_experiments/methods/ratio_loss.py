"""Ratio Loss (Wang et al., 2021): the server infers the imbalance from a small balanced auxiliary set.

Each round from the second on, for every class p, dW_p = minus the output layer's gradient on the auxiliary samples
of class p. A position of that layer belongs to class p where dW_p is the largest over classes and dominates: every
other class has |dW| <= 0.8 |dW_p|. With o the mean of dW over the other classes,

    R_p = |sum of dW_p over p's positions| / |sum of o over p's positions|,     a_p = alpha + beta R_p

and clients train on sum_i a_{y_i} CE_i / sum_i a_{y_i}: R reaches 5000 where the other classes hardly move a position,
and without the division so does the step. (CLIMB's re-implementation divides too, the authors do not: they train with
a learning rate of 0.001.) The authors train a copy per class; one gradient gives the same ratios up to
the curvature of a few steps, at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtail.core.records import Tensors, Update
from fedtail.data.federation import Federation
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, Server, cross_entropy, pick, relative
from fedtail.models.flat import FlatModel
from fedtail_experiments.methods.auxiliary import auxiliary_monitor

DOMINANCE = 0.8
NO_CONTRAST = 10.0
"""R of a class whose denominator is 0, as in the authors' code."""
CAP = 5000.0


@dataclass(frozen=True)
class RatioLoss(Method):
    """``alpha = 1, beta = 0`` is FedAvg. Needs ``data.auxiliary`` samples per class: 63, as the authors have, but no
    more than a tenth of a class, or five."""

    title = "Ratio Loss"
    paper = "Wang et al., Addressing Class Imbalance in Federated Learning, AAAI 2021"
    wire = "a C-vector of class weights down; the server needs its own small auxiliary set"
    needs_auxiliary = True
    whole_batch = True
    plain_steps = "the server infers class sizes from plain gradient steps"

    alpha: float = 1.0
    beta: float = 0.1
    normalize: bool = True
    """Divide a batch's weighted loss by its sum of weights, and not by its number of samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.alpha", self.alpha, 0.0)
        check_range("method.beta", self.beta, 0.0)

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        return {"class_weight": run.message["class_weight"].to(run.device, torch.float32)}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        weight = pick(const["class_weight"], batch.y)
        if self.normalize:
            weight = relative(weight, batch)
        return weight * cross_entropy(logits, batch.y), state

    # -- server

    def auxiliary_gradients(self, model: FlatModel, federation: Federation) -> Callable[[Tensor], Tensor]:
        return auxiliary_monitor(model, federation)

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"class_weight": torch.ones(n_classes), "composition": torch.full((n_classes,), 1.0 / n_classes)}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        if server.round == 0:
            return state
        change = -server.auxiliary_gradients().double().cpu()
        return {**state, "class_weight": (self.alpha + self.beta * class_ratios(change)).float()}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"class_weight": state["class_weight"]}

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        n = float(sum(u.n_samples for u in updates))
        # the sum of the samples' gradients, from each client's mean step
        total: Tensor = torch.zeros((), dtype=torch.float64)
        for u, probe in zip(updates, choice, strict=True):
            moved = server.output_weight(u.delta[probe]).double().cpu()
            total = total + u.n_samples * moved / (server.lr * max(u.steps[probe], 1))
        change = -server.auxiliary_gradients().double().cpu()
        return {**state, "composition": (composition(change, total, n) / n).float()}

    def stats(self, state: Tensors) -> dict[str, Any]:
        return {
            "class_weight": state["class_weight"].tolist(),
            "estimated_composition": state["composition"].tolist(),
        }


def class_ratios(change: Tensor) -> Tensor:
    """(C,) R. change: (C, rows, columns) dW of each class."""
    here = owned(change)
    above, below = here.sums(here.own).abs(), here.sums(here.other).abs()
    ratio = above / torch.where(below > 0, below, torch.ones_like(below))
    return torch.where(below > 0, ratio, torch.full_like(ratio, NO_CONTRAST)).clamp_max(CAP)


class Owned(NamedTuple):
    """The N positions that belong to some class. A position has one owner at most, so with a hundred classes 99 of a
    hundred numbers of ``change`` play no part in any sum."""

    n_classes: int
    at: Tensor
    """(rows, columns) bool."""
    owner: Tensor
    """(N,) the class."""
    own: Tensor
    """(N,) its dW."""
    other: Tensor
    """(N,) the mean of the other classes' dW."""

    def sums(self, values: Tensor) -> Tensor:
        """(C,) of values (N,)."""
        return values.new_zeros(self.n_classes).index_add_(0, self.owner, values)


def owned(change: Tensor) -> Owned:
    """Which positions belong to which class."""
    n_classes = change.shape[0]
    top, winner = change.max(dim=0)
    rivals = (change.abs() > DOMINANCE * top.abs()).sum(dim=0)  # the winner itself is one of them, unless it is 0
    at = (rivals == 1) & (top != 0)
    other = (change.sum(dim=0)[at] - top[at]) / max(n_classes - 1, 1)
    return Owned(n_classes=n_classes, at=at, owner=winner[at], own=top[at], other=other)


def composition(change: Tensor, total: Tensor, n: float) -> Tensor:
    """(C,) estimated samples per class behind an update: the n_p of dW_p n_p + o_p (n - n_p) = total, per position.

    total: (rows, columns) sum over the n samples of what each moved the output layer. Solutions outside
    (0, 1.5 n / C) are dropped and the rest averaged; a class with none left gets n / C.
    """
    here = owned(change)
    gap = here.own - here.other
    solved = (total[here.at] - n * here.other) / torch.where(gap != 0, gap, torch.ones_like(gap))
    keep = ((gap != 0) & (solved > 0) & (solved < 1.5 * n / here.n_classes)).to(change.dtype)
    kept = here.sums(keep)
    mean = here.sums(solved * keep) / kept.clamp_min(1)
    return torch.where(kept > 0, mean, torch.full_like(mean, n / here.n_classes))
