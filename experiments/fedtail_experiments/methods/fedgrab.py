"""Fed-GraB (Xiao et al., 2023): a gradient balancer per class at each client.

Sigmoid cross-entropy over C outputs. The gradient at output c is multiplied by a_c+ on samples of class c and by a_c-
on all others. A PID controller per class drives the accumulated positive and negative gradients A+, A- together and
lives on over rounds: with error e = A- - A+,

    u <- u + Kp (e0 - e1) + Ki e0 + Kd (e0 - 2 e1 + e2),  |u| <= limit
    a+ = phi(u),  a- = phi(-u),   phi(v) = (10/9) / (1/9 + exp(-v/2))   in (0, 10), phi(0) = 1

As in the released code every class has a balancer, and in each step balancers rest at random, those of frequent
classes most (``bypass``). Two things differ. The accumulated error has no reason to return to zero at a client with
few samples of a class, and with the authors' limit of 100, where phi has saturated long before, single classes end
with a+ of 10 and a- of 0 and training collapses: here |u| <= 1. And the released client has the classifier in no
optimizer, so it stays at the mean of random weights; here it is trained.

The paper's text has balancers for tail classes only (``balance = "tail"``), which the server's prior analyser finds:
row norms of the classifier, z-scored, shifted to minimum 0, normalised, averaged over rounds. Under resampling these
norms do not follow the frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.random import generator
from fedtail.core.records import Tensors
from fedtail.errors import check_range, one_of
from fedtail.methods.base import Batch, LocalRun, Method, Server, one_hot

BALANCE = ("tail", "all", "none")
HEAD, TAIL = 0.75, 0.95
BYPASS = ("step", "round", "none")
RESTS = 256
"""Rests are drawn for so many steps; a longer local run goes through them again."""
STATE = ("positive", "negative", "error1", "error2", "output")


@dataclass(frozen=True)
class FedGraB(Method):
    """``balance="none"`` is FedAvg with sigmoid cross-entropy. ``limit=100`` is the authors' code, ``balance="tail",
    bypass="none", limit=100`` their paper; in both the classifier is trained here."""

    title = "Fed-GraB"
    paper = "Xiao et al., Fed-GraB: Federated Long-Tailed Learning with Self-Adjusting Gradient Balancer, NeurIPS 2023"
    wire = "nothing; with balance=tail a C-vector prior down"
    client_state = "5 numbers per class (gradient balancers)"
    stateful_loss = True

    kp: float = 10.0
    ki: float = 0.01
    kd: float = 0.1
    balance: str = "all"
    """Which classes have a balancer: ``all``, ``tail`` or ``none``."""
    bypass: bool | str = "step"
    """Let balancers rest, those of the client's frequent classes most often: in single steps (``step``), in whole
    rounds (``round``), or not at all (``none``). A balancer at rest weighs by 1 and accumulates nothing."""
    limit: float = 1.0
    """Largest controller output |u|. 1 keeps weights within 0.63 and 1.55, 2 within 0.39 and 2.32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("kp", "ki", "kd"):
            check_range(f"method.{key}", getattr(self, key), 0.0)
        if self.balance not in BALANCE:
            raise one_of("method.balance", self.balance, BALANCE)
        if isinstance(self.bypass, bool):  # how version 0.1 wrote it
            object.__setattr__(self, "bypass", "round" if self.bypass else "none")
        if self.bypass not in BYPASS:
            raise one_of("method.bypass", self.bypass, BYPASS)
        check_range("method.limit", self.limit, 0.0)

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        n_classes = len(run.counts)
        if self.balance == "tail":
            balanced = class_thirds(run.message.get("prior", torch.zeros(n_classes)).double().cpu()) == 2
        else:
            balanced = torch.full((n_classes,), self.balance == "all")
        on = balanced.expand(RESTS if self.bypass == "step" else 1, -1)
        if self.bypass != "none":
            rng = generator(run.seed, "fedgrab/bypass", run.client, run.round)
            on = on & ~torch.as_tensor(rests(run.counts, len(on), rng))
        kept = {key: client_state.get(key, torch.zeros(n_classes)).to(run.device) for key in STATE}
        keep = balanced.to(run.device)  # a class that leaves the tail starts from rest when it comes back
        state = {key: torch.where(keep, v, 0.0) for key, v in kept.items()}
        return {"on": on.to(run.device)}, {**state, "step": torch.zeros(1, dtype=torch.int64, device=run.device)}

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        return {key: state[key].detach() for key in STATE}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        table, step = const["on"], state["step"]
        here = (step % table.shape[-2]).unsqueeze(-1).expand(*table.shape[:-2], 1, table.shape[-1])
        on, target = table.gather(-2, here).squeeze(-2), one_hot(batch.y, logits.shape[-1])
        error = state["negative"] - state["positive"]
        output = pid_step(state["output"], error, state["error1"], state["error2"], self.kp, self.ki, self.kd)
        output = output.clamp(-self.limit, self.limit)
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
        kept = {key: torch.where(on, new[key], state[key]) for key in STATE}
        return balanced.sum(dim=-1), {**state, **kept, "step": step + 1}

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"prior": torch.zeros(n_classes, dtype=torch.float64), "rounds": torch.zeros((), dtype=torch.float64)}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        if server.round == 0 or self.balance != "tail":  # before the first aggregate there is nothing to analyse
            return state
        rounds = state["rounds"] + 1
        found = classifier_prior(server.output_weight(server.x)).to(state["prior"])
        return {"prior": state["prior"] + (found - state["prior"]) / rounds, "rounds": rounds}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"prior": state["prior"].float()} if self.balance == "tail" else {}

    def stats(self, state: Tensors) -> dict[str, Any]:
        if self.balance != "tail":
            return {}
        return {"prior": state["prior"].tolist(), "thirds": class_thirds(state["prior"]).tolist()}


def pid_step(u: Tensor, e0: Tensor, e1: Tensor, e2: Tensor, kp: float, ki: float, kd: float) -> Tensor:
    """Incremental PID controller."""
    return u + kp * (e0 - e1) + ki * e0 + kd * (e0 - 2 * e1 + e2)


def rests(counts: np.ndarray, steps: int, rng: np.random.Generator) -> np.ndarray:
    """(steps, C) bool, which balancers rest in which step, as the released code draws it: classes come in order of
    frequency, each rests with probability 0.1^(j / (C - 1)), where j counts those of the step that rest already. So the
    most frequent class always rests, the rarest of ten in 29 % of the steps."""
    n_classes = len(counts)
    order = np.lexsort((np.arange(n_classes), -np.asarray(counts)))
    out, resting = np.zeros((steps, n_classes), dtype=bool), np.zeros(steps)
    draws = rng.random((steps, n_classes))
    for rank, c in enumerate(order):
        out[:, c] = draws[:, rank] < 0.1 ** (resting / max(n_classes - 1, 1))
        resting += out[:, c]
    return out


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
