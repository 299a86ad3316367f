"""Logit adjustment (Menon et al., 2021) and balanced softmax (Ren et al., 2020).

    loss = CE(z + tau log pi, y)

pi are class proportions *after* resampling, q(r): adjusting resampled batches by original proportions would correct
twice. Balanced softmax adds log n_c, which is tau = 1 up to a shift that softmax does not see. Classes with pi_c = 0
leave the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors, Update
from fedtail.errors import check_range, one_of
from fedtail.methods.base import Batch, LocalRun, Method, Server, cross_entropy
from fedtail.methods.registry import METHODS

PRIORS = ("local", "global")
MASKED = -1e9
"""Logit of a class that takes no part in the softmax: finite, so that no NaN can arise, and exactly 0 after exp."""


@METHODS.add("logit_adjustment")
@dataclass(frozen=True)
class LogitAdjustment(Method):
    """``prior="local"`` keeps label counts at home. ``prior="global"`` makes every client reveal its class
    proportions once per round; in its first round, and for classes nobody has reported yet, a client falls back on
    its own."""

    title = "Logit adjustment"
    paper = "Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021"
    wire = (
        "nothing with prior=local; with prior=global each client's class proportions go up (a label histogram) "
        "and their C-vector mean comes down"
    )

    tau: float = 1.0
    """Strength; 0 is cross-entropy."""
    prior: str = "local"
    """``local`` or ``global``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.tau", self.tau, 0.0)
        if self.prior not in PRIORS:
            raise one_of("method.prior", self.prior, PRIORS)

    @property
    def reveals_classes(self) -> bool:
        return self.prior == "global"

    # -- client

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        prior = proportions(run.resampled)
        if "prior" in run.message:
            known = run.message["prior"].double().cpu().numpy()
            prior = proportions(np.where(known > 0, known, prior))
        return {"adjustment": torch.as_tensor(adjustment(prior, self.tau), device=run.device)}, {}

    def finish(
        self, run: LocalRun, delta: Tensor, const: Tensors, state: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        if self.prior == "local":
            return client_state, {}
        return client_state, {"proportions": torch.as_tensor(proportions(run.resampled), dtype=torch.float32)}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        return cross_entropy(adjusted(logits, const["adjustment"]), batch.y), state

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        if self.prior == "local":
            return {}
        return {"proportions": torch.zeros(n_clients, n_classes), "prior": torch.zeros(n_classes)}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"prior": state["prior"]} if self.prior == "global" else {}

    def after_round(self, server: Server, updates: Sequence[Update], choice: Sequence[int], state: Tensors) -> Tensors:
        if self.prior == "local":
            return state
        table = state["proportions"].clone()
        for update, probe in zip(updates, choice, strict=True):
            table[update.client] = update.extras["proportions"][probe].to(table)
        known = (table.sum(dim=1) > 0).double() * torch.as_tensor(server.weights, device=table.device)
        return {"proportions": table, "prior": ((known / known.sum()) @ table.double()).float()}


def proportions(counts: np.ndarray) -> np.ndarray:
    """(C,) float64, summing to 1."""
    n = np.asarray(counts, dtype=np.float64)
    return n / n.sum() if n.sum() > 0 else n


def adjustment(prior: np.ndarray, tau: float) -> np.ndarray:
    """(C,) float32 tau log pi, with ``MASKED`` for absent classes; all zero for tau = 0."""
    present = prior > 0
    out = np.full(prior.shape, MASKED if tau > 0 else 0.0)
    out[present] = tau * np.log(prior[present])
    return out.astype(np.float32)


def adjusted(logits: Tensor, shift: Tensor) -> Tensor:
    """(..., B, C) logits plus the adjustment (..., C), masked classes pinned."""
    shift = shift.unsqueeze(-2)
    return torch.where(shift > MASKED, logits + shift, MASKED)
