"""FedLC (Zhang et al., 2022): logits calibrated by each client's own class counts.

    loss = CE(z - tau n^(-1/4), y)

with n_c the client's samples of class c *after* resampling, as for every loss of counts here. Rare classes get the
larger margin; a class that the client does not have leaves the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import Batch, LocalRun, Method, cross_entropy
from fedtail.methods.logit_adjustment import MASKED, adjusted


@dataclass(frozen=True)
class FedLC(Method):
    """``tau = 0`` is FedAvg."""

    title = "FedLC"
    paper = "Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022"

    tau: float = 1.0
    """Strength of the margins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.tau", self.tau, 0.0)

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        return {"adjustment": torch.as_tensor(margins(run.resampled, self.tau), device=run.device)}, {}

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        return cross_entropy(adjusted(logits, const["adjustment"]), batch.y), state


def margins(counts: np.ndarray, tau: float) -> np.ndarray:
    """(C,) float32 -tau n^(-1/4), ``MASKED`` for absent classes; all zero for tau = 0."""
    n = np.asarray(counts, dtype=np.float64)
    out = np.full(n.shape, MASKED if tau > 0 else 0.0)
    out[n > 0] = -tau * n[n > 0] ** -0.25
    return out.astype(np.float32)
