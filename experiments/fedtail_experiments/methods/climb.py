"""CLIMB (Shen et al., 2022): keep clients' losses alike by reweighting clients on the server.

min (1/K) sum_i f_i  s.t.  f_i - mean_j f_j <= eps, by primal-dual steps. Every ``primal_rounds`` rounds:

    l_i = loss of the global model on client i's training data, from ALL clients
    run the rounds with client weights w_i = 1 + lambda_i - mean lambda
    lambda_i <- clip(lambda_i + eta (l_i - mean l - eps) / K, 0, 100)

The authors' scripts have (eta, eps) of (2, 0.01), (0.1, 0.1) and (1, 1), over a thousand dual steps. A run here takes
about ten, in which the first alone lets the constraint act: of five clients, one whose loss is 0.5 above the others'
ends with weight 2.5 after twelve steps, where (0.1, 0.1) gives it 1.06.

With clients of unequal size the weights multiply p_i; they are clamped at 0, where the authors' code can go negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors, Update
from fedtail.errors import check_range
from fedtail.methods.base import LocalStep, Method, Server
from fedtail_experiments.methods.measurements import TRAIN_LOSS

LAMBDA_MAX = 100.0


@dataclass(frozen=True)
class CLIMB(Method):
    """Equal losses, or eps too large to matter, keep FedAvg, with gradients clipped at 5."""

    title = "CLIMB"
    paper = "Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022"
    wire = "a scalar training loss up from each client, every primal_rounds rounds"

    eta: float = 2.0
    """Dual step."""
    eps: float = 0.01
    """Tolerance: how much a client's loss may exceed the mean."""
    primal_rounds: int = 5
    clip: float | None = 5.0
    """Norm at which batch gradients are clipped, as the authors do; None does not clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.eta", self.eta, 0.0)
        check_range("method.eps", self.eps, 0.0)
        check_range("method.primal_rounds", self.primal_rounds, 1)
        if self.clip is not None:
            check_range("method.clip", self.clip, 0.0, open_low=True)

    # -- client

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        total = step.grads.sum(dim=-2)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
            total = total * (self.clip / (norm + 1e-6)).clamp_max(1.0)
        return total, step.state

    # -- server

    def init_server(self, n_clients: int, n_classes: int, n_params: int) -> Tensors:
        zeros = torch.zeros(n_clients, dtype=torch.float64)
        return {"lambda": zeros, "loss": zeros.clone()}

    def before_round(self, server: Server, state: Tensors) -> Tensors:
        if server.round % self.primal_rounds:
            return state
        dual = state["lambda"]
        if server.round > 0:
            dual = self.dual_step(dual, state["loss"])
        values = {k: float(v) for k, v in server.measure(TRAIN_LOSS).items()}
        typical = sum(values.values()) / max(len(values), 1)  # for clients that did not answer
        losses = [values.get(k, typical) for k in range(server.n_clients)]
        return {"lambda": dual, "loss": torch.tensor(losses, dtype=torch.float64, device=dual.device)}

    def dual_step(self, dual: Tensor, losses: Tensor) -> Tensor:
        """(K,) lambda after one step on the losses (K,) taken before the primal rounds."""
        return (dual + self.eta * (losses - losses.mean() - self.eps) / len(losses)).clamp(0.0, LAMBDA_MAX)

    def weights(self, p: np.ndarray, updates: Sequence[Update], state: Tensors) -> np.ndarray:
        w = client_weights(state["lambda"]).cpu().numpy()
        return p * w[[u.client for u in updates]]

    def stats(self, state: Tensors) -> dict[str, Any]:
        return {"lambda": state["lambda"].tolist(), "client_loss": state["loss"].tolist()}


def client_weights(dual: Tensor) -> Tensor:
    """(K,) w = 1 + lambda - mean lambda, at least 0."""
    return (1.0 + dual - dual.mean()).clamp_min(0.0)
