"""Fed-GraB (Xiao et al., 2023): a gradient balancer per class at each client, for tail classes only.

Sigmoid cross-entropy over C outputs. The gradient at output c is multiplied by a_c+ on samples of class c and by a_c-
on all others. A PID controller per class drives the accumulated positive and negative gradients A+, A- together and
lives on over rounds: with error e = A- - A+,

    u <- u + Kp (e0 - e1) + Ki e0 + Kd (e0 - 2 e1 + e2),  |u| <= 100
    a+ = phi(u),  a- = phi(-u),   phi(v) = (10/9) / (1/9 + exp(-v/2))   in (0, 10), phi(0) = 1

The server's prior analyser (DPA) finds the tail: row norms of the classifier, z-scored, shifted to minimum 0,
normalised, averaged over rounds. Unlike the released code the classifier is trained, the analyser is used, and no
balancer is skipped at random (``bypass``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.random import generator
from fedtail.core.records import Tensors
from fedtail.errors import check_range, one_of
from fedtail.methods.base import Batch, LocalRun, Method, Server, one_hot
from fedtail.methods.registry import METHODS

BALANCE = ("tail", "all", "none")
HEAD, TAIL = 0.75, 0.95
U_MAX = 100.0
STATE = ("positive", "negative", "error1", "error2", "output")


@METHODS.add("fedgrab")
@dataclass(frozen=True)
class FedGraB(Method):
    """``balance="none"`` is FedAvg with sigmoid cross-entropy; ``"all"`` balances every class."""

    title = "Fed-GraB"
    paper = "Xiao et al., Fed-GraB: Federated Long-Tailed Learning with Self-Adjusting Gradient Balancer, NeurIPS 2023"
    wire = "a C-vector prior down"
    client_state = "5 numbers per class (gradient balancers)"
    stateful_loss = True

    kp: float = 10.0
    ki: float = 0.01
    kd: float = 0.1
    balance: str = "tail"
    """Which classes have a balancer: ``tail``, ``all`` or ``none``."""
    bypass: bool = False
    """Rest each balancer for a round with probability 0.1^(rank / (C - 1)), rank 0 the most frequent class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("kp", "ki", "kd"):
            check_range(f"method.{key}", getattr(self, key), 0.0)
        if self.balance not in BALANCE:
            raise one_of("method.balance", self.balance, BALANCE)

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        n_classes = len(run.counts)
        prior = run.message.get("prior", torch.zeros(n_classes)).double().cpu()
        if self.balance == "tail":
            balanced = class_thirds(prior) == 2
        else:
            balanced = torch.full((n_classes,), self.balance == "all")
        on = balanced.clone()
        if self.bypass:
            rank = torch.argsort(torch.argsort(-prior, stable=True)).double() / max(n_classes - 1, 1)
            draw = generator(run.seed, "fedgrab/bypass", run.client, run.round).random(n_classes)
            on &= torch.as_tensor(draw) >= 0.1**rank
        kept = {key: client_state.get(key, torch.zeros(n_classes)).to(run.device) for key in STATE}
        keep = balanced.to(run.device)  # a class that leaves the tail starts from rest when it comes back
        return {"on": on.to(run.device)}, {key: torch.where(keep, v, 0.0) for key, v in kept.items()}

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        return {key: state[key].detach() for key in STATE}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        on, target = const["on"], one_hot(batch.y, logits.shape[-1])
        error = state["negative"] - state["positive"]
        output = pid_step(state["output"], error, state["error1"], state["error2"], self.kp, self.ki, self.kd)
        up = torch.where(on, gain(output), 1.0).unsqueeze(-2)
        down = torch.where(on, gain(-output), 1.0).unsqueeze(-2)
        weight = torch.where(target, up, down)
        each = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
        # the value stays the plain loss, its gradient is multiplied by the weight: the authors' backward hook
        balanced = each + (weight - 1.0) * (each - each.detach())

        real = batch.weight.unsqueeze(-1)
        size = batch.weight.sum(dim=-1, keepdim=True).clamp_min(1.0)
        pull = weight * (torch.sigmoid(logits.detach()) - target.to(logits.dtype)).abs() * real
        positive = torch.where(target, pull, 0.0).sum(dim=-2) / size
        negative = torch.where(target, 0.0, pull).sum(dim=-2) / size
        new = {
            "positive": state["positive"] + positive,
            "negative": state["negative"] + negative,
            "error1": error,
            "error2": state["error1"],
            "output": output,
        }
        return balanced.sum(dim=-1), {key: torch.where(on, new[key], state[key]) for key in STATE}

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"prior": torch.zeros(n_classes, dtype=torch.float64), "rounds": torch.zeros((), dtype=torch.float64)}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        if server.round == 0:  # nothing is aggregated yet, so there is nothing to analyse and no balancer runs
            return state
        rounds = state["rounds"] + 1
        found = classifier_prior(server.output_weight(server.x)).to(state["prior"])
        return {"prior": state["prior"] + (found - state["prior"]) / rounds, "rounds": rounds}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"prior": state["prior"].float()}

    def stats(self, state: Tensors) -> dict[str, Any]:
        return {"prior": state["prior"].tolist(), "thirds": class_thirds(state["prior"]).tolist()}


def pid_step(u: Tensor, e0: Tensor, e1: Tensor, e2: Tensor, kp: float, ki: float, kd: float) -> Tensor:
    """Incremental PID controller with a limited output."""
    return (u + kp * (e0 - e1) + ki * e0 + kd * (e0 - 2 * e1 + e2)).clamp(-U_MAX, U_MAX)


def gain(v: Tensor) -> Tensor:
    """phi: (-inf, inf) -> (0, 10)."""
    return (10 / 9) / (1 / 9 + torch.exp(-v / 2))


def classifier_prior(weight: Tensor) -> Tensor:
    """(C,) class shares read off the classifier's row norms; uniform if all norms agree."""
    norms = torch.linalg.vector_norm(weight.double(), dim=1)
    spread = norms.std(unbiased=False)
    if float(spread) <= 1e-12 * float(norms.mean()):
        return torch.full_like(norms, 1.0 / len(norms))
    score = (norms - norms.mean()) / spread
    score = score - score.min()
    return score / score.sum()


def class_thirds(prior: Tensor) -> Tensor:
    """(C,) 0 head, 1 middle, 2 tail: by the share of all classes before it in descending order, cut at 75 and 95 %.

    Without a prior (all zero) every class counts as head.
    """
    if not bool((prior > 0).any()):
        return torch.zeros(len(prior), dtype=torch.int64)
    order = torch.argsort(-prior, stable=True)
    ranked = prior.double()[order] / prior.double().sum()
    before = torch.cat([torch.zeros(1, dtype=torch.float64, device=prior.device), ranked.cumsum(0)[:-1]])
    out = torch.empty(len(prior), dtype=torch.int64, device=prior.device)
    out[order] = (before >= HEAD - 1e-9).long() + (before >= TAIL - 1e-9).long()
    return out
