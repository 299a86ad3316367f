"""FedReLa (Hu et al., 2026): frequent samples that look like a rarer class are given its label.

Every client compares the global model's answers q for a sample of class y with its answers for the client's other
samples of that class. Where q_c is unusually high and c is rarer, the label may become c:

    z_c = (q_c - mean_y(q_c)) / std_y(q_c),      rate_c = tanh(z_c - threshold) max(prior_c - prior_y, 0)

prior is 1 for the client's rarest and 0 for its most frequent class, linear in its counts between them. Each class with
a positive rate is drawn with it; of those drawn the one of the highest rate is the new label. No count and no label
leaves the client.

The authors do this once, after four fifths to nine tenths of the rounds, and train on with what was drawn. Here, from
``begin`` of the rounds on, the loss is the expectation over the draw, by the answers of the round's global model, so
that nothing has to be remembered of single samples; means and deviations are of the client's last local run. The
authors' threshold is the client's own quantile (the top 5 % of z for each class); here it is that of a normal
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import FedtailError, check_range
from fedtail.methods.base import Batch, LocalRun, Method, Server, one_hot

NARROWEST = 1e-3
"""Deviations below count as this: where a model is sure of all samples of a class, none of them stands out."""


@dataclass(frozen=True)
class FedReLa(Method):
    """``begin = 1`` is FedAvg."""

    title = "FedReLa"
    paper = "Hu et al., FedReLa: Imbalanced Federated Learning via Re-Labeling, ICML 2026"
    wire = "nothing up; down, whether relabelling has begun"
    client_state = "C x C means and deviations of the global model's answers"
    stateful_loss = True
    needs_teacher = True

    begin: float = 0.8
    """Share of the rounds before relabelling begins."""
    top: float = 0.05
    """Share of samples whose answer for a class counts as unusually high; in (0, .5]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.begin", self.begin, 0.0, 1.0)
        check_range("method.top", self.top, 0.0, 0.5, open_low=True)

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        c = len(run.counts)
        told = client_state.get("moments", torch.zeros(3, c, c)).to(run.device)
        n, mean = told[0], told[1] / told[0].clamp_min(1)
        deviation = (told[2] / n.clamp_min(1) - mean**2).clamp_min(0).sqrt().clamp_min(NARROWEST)
        prior = torch.as_tensor(rarity(run.counts), dtype=torch.float32, device=run.device)
        allowed = (prior - prior.unsqueeze(-1)).clamp_min(0) * (n > 1) * run.message["relabel"].to(run.device)
        const = {"mean": mean, "deviation": deviation, "allowed": allowed}
        return const, {"moments": torch.zeros(3, c, c, device=run.device)}

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        return {"moments": state["moments"].detach()}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        if batch.teacher is None:
            raise FedtailError("FedReLa needs the global model's answers, which this engine does not give")
        own = one_hot(batch.y, logits.shape[-1]).to(logits.dtype)
        answers = torch.softmax(batch.teacher, dim=-1).to(logits.dtype)
        threshold = NormalDist().inv_cdf(1 - self.top)
        unusual = torch.tanh((answers - own @ const["mean"]) / (own @ const["deviation"]) - threshold)
        labels = expected_labels(unusual.clamp_min(0) * (own @ const["allowed"]), own)
        losses = -(labels * torch.log_softmax(logits, dim=-1)).sum(-1)
        mine = (own * batch.weight.unsqueeze(-1)).transpose(-1, -2)
        seen = torch.stack([mine @ torch.ones_like(answers), mine @ answers, mine @ answers**2], dim=-3)
        return losses, {**state, "moments": state["moments"] + seen.detach()}

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        return {"relabel": torch.zeros(())}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        return {"relabel": torch.tensor(float(server.round >= self.begin * server.rounds))}

    def broadcast(self, state: Tensors) -> Tensors:
        return state


def rarity(counts: np.ndarray) -> np.ndarray:
    """(C,) 1 for the rarest class (absent ones included), 0 for the most frequent, linear in the counts between."""
    n = np.asarray(counts, dtype=np.float64)
    return np.ones_like(n) if n.max() == n.min() else 1 - (n - n.min()) / (n.max() - n.min())


def expected_labels(rates: Tensor, own: Tensor) -> Tensor:
    """(..., B, C) chance of each label: the highest-rated of the classes drawn, or the sample's own if none is.

    rates: (..., B, C), 0 for its own; own: (..., B, C) one-hot."""
    ordered, order = rates.sort(dim=-1, descending=True, stable=True)
    missed = torch.cumprod(1 - ordered, dim=-1)
    before = torch.cat([torch.ones_like(missed[..., :1]), missed[..., :-1]], dim=-1)
    return torch.zeros_like(rates).scatter(-1, order, ordered * before) + own * missed[..., -1:]
