"""Server optimizers (FedOpt, Reddi et al., 2021): any method can switch one on.

The round's aggregate is turned into a pseudo-gradient ``x - aggregate``, which the optimizer steps on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtail.core.errors import check_range, one_of
from fedtail.core.records import Tensors

SERVER_OPTIMIZERS = ("none", "momentum", "adam")


@dataclass
class ServerOptimizer:
    """``none`` takes the aggregate as it is; ``momentum`` is FedAvgM; ``adam`` is FedAdam."""

    kind: str = "none"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    state: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in SERVER_OPTIMIZERS:
            raise one_of("server optimizer", self.kind, SERVER_OPTIMIZERS)
        check_range("server.lr", self.lr, 0.0, open_low=True)
        check_range("server.beta1", self.beta1, 0.0, 1.0, open_high=True)
        check_range("server.beta2", self.beta2, 0.0, 1.0, open_high=True)

    def step(self, x: Tensor, aggregate: Tensor) -> Tensor:
        """The next global model."""
        if self.kind == "none":
            return aggregate
        gradient = x - aggregate
        zeros = torch.zeros_like(x)
        m = self.state.get("m", zeros)
        if self.kind == "momentum":
            self.state["m"] = self.beta1 * m + gradient
            return x - self.lr * self.state["m"]
        m = self.beta1 * m + (1 - self.beta1) * gradient
        v = self.beta2 * self.state.get("v", zeros) + (1 - self.beta2) * gradient**2
        self.state.update(m=m, v=v)
        return x - self.lr * m / (v.sqrt() + self.tau)
