"""FedYoYo (Yan et al., 2025): every sample teaches itself, its weak view the strong one, under adjusted logits.

A batch holds each sample twice, weakly and strongly augmented. With z the logits plus tau log(prior):

    loss = CE(z, y) over both views + lambda w KL(softmax(z_weak / T) || softmax(z_strong / T)) over samples whose weak
           view is classified correctly,     w = min(round / warmup, 1), round = 1, 2, ...

The prior is the server's, and moves towards the client's own class shares by ``gamma`` in every step. The server's
comes from effective numbers of samples: each client sends for each class, summed over pieces of 64 samples, 1 over the
mean cosine of their centred features; the sums over clients are averaged over rounds, .9 of the old and .1 of the new.
The authors replace outliers of that ratio, which has no upper limit; here it is at most the number of samples, which
says the same. On data without images both views are the sample itself and the second term has no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, Server, cross_entropy
from fedtail.methods.logit_adjustment import proportions
from fedtail_experiments.methods.measurements import EFFECTIVE_NUMBERS
from fedtail_experiments.methods.views import WEAK_AND_STRONG

KEEP = 0.9
"""Of the old effective numbers in each round's."""
LEAST = 1e-9


@dataclass(frozen=True)
class FedYoYo(Method):
    """``distill = 0, tau = 0`` is FedAvg on two views."""

    title = "FedYoYo"
    paper = (
        "Yan et al., You Are Your Own Best Teacher: Achieving Centralized-level Performance in Federated Learning "
        "under Heterogeneous and Long-tailed Data, ICCV 2025"
    )
    wire = (
        "every round, from every client: an effective number of samples for each class (which shows which classes it "
        "has); a C-vector prior down"
    )
    views = WEAK_AND_STRONG
    stateful_loss = True
    whole_batch = True

    tau: float = 1.5
    """Strength of the logit adjustment."""
    gamma: float = 0.1
    """How far the prior moves towards the client's own class shares in a step."""
    distill: float = 4.0
    """Weight lambda of the distillation."""
    temperature: float = 1.5
    warmup: int = 50
    """Rounds over which the distillation grows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.tau", self.tau, 0.0)
        check_range("method.gamma", self.gamma, 0.0, 1.0)
        check_range("method.distill", self.distill, 0.0)
        check_range("method.temperature", self.temperature, 0.0, open_low=True)
        check_range("method.warmup", self.warmup, 1)

    @property
    def reveals_classes(self) -> bool:
        return True

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        own = torch.as_tensor(proportions(run.resampled), dtype=torch.float32, device=run.device)
        weight = self.distill * min((run.round + 1) / self.warmup, 1.0)
        const = {"own": own, "distill": torch.full((1,), weight, device=run.device)}
        return const, {"prior": run.message["prior"].to(run.device, torch.float32)}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        prior = (1 - self.gamma) * state["prior"] + self.gamma * const["own"]
        z = logits + (prior**self.tau + LEAST).log().unsqueeze(-2)
        pairs = z.unflatten(-2, (-1, 2))
        weak, strong = pairs[..., 0, :], pairs[..., 1, :]
        teacher = torch.softmax(weak.detach() / self.temperature, -1)
        told = (torch.xlogy(teacher, teacher) - teacher * F.log_softmax(strong / self.temperature, -1)).sum(-1)
        real = batch.weight.unflatten(-1, (-1, 2))[..., 1]
        right = (weak.detach().argmax(-1) == batch.y.unflatten(-1, (-1, 2))[..., 0]) * real
        # the engine takes the mean over all views; this is the mean over the samples that count
        share = batch.weight.sum(-1, keepdim=True) / right.sum(-1, keepdim=True).clamp_min(1.0)
        extra = const["distill"] * share * right * told
        both = torch.stack([torch.zeros_like(extra), extra], -1).flatten(-2)
        return cross_entropy(z, batch.y) + both, {**state, "prior": prior}

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"numbers": torch.ones(n_classes, dtype=torch.float64), "rounds": torch.zeros((), dtype=torch.float64)}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        sent = server.measure(EFFECTIVE_NUMBERS)
        now = 1.0 + torch.stack([sent[k].double().cpu() for k in sorted(sent)]).sum(0)
        numbers = KEEP * state["numbers"] + (1 - KEEP) * now if bool(state["rounds"] > 0) else now
        return {"numbers": numbers, "rounds": state["rounds"] + 1}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"prior": (state["numbers"] / state["numbers"].sum()).float()}

    def stats(self, state: Tensors) -> dict[str, Any]:
        return {"prior": np.round((state["numbers"] / state["numbers"].sum()).numpy(), 6).tolist()}
