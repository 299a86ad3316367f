"""Server optimizers (FedOpt, Reddi et al., 2021): any method can switch one on.

The round's aggregate is turned into a pseudo-gradient g = x - aggregate, on which the server steps:

    momentum (FedAvgM)   m <- beta1 m + g;                    x <- x - lr m
    adagrad              v <- v + g^2                      }
    adam                 v <- beta2 v + (1 - beta2) g^2    }  m <- beta1 m + (1 - beta1) g
    yogi                 v <- v - (1 - beta2) g^2 sign(v - g^2) }  x <- x - lr m / (sqrt(v) + tau)

with m = 0 and v = tau^2 at the start, and no bias correction, as in the paper's algorithm 2. Float buffers
(BatchNorm statistics) are not optimized: they take the aggregate's values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import check_range, one_of

SERVER_OPTIMIZERS = ("none", "momentum", "adam", "yogi", "adagrad")


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
            raise one_of("server.optimizer", self.kind, SERVER_OPTIMIZERS)
        check_range("server.lr", self.lr, 0.0, open_low=True)
        check_range("server.beta1", self.beta1, 0.0, 1.0, open_high=True)
        check_range("server.beta2", self.beta2, 0.0, 1.0, open_high=True)
        check_range("server.tau", self.tau, 0.0, open_low=True)

    def step(self, x: Tensor, aggregate: Tensor, n_params: int | None = None) -> Tensor:
        """The next global model. x, aggregate: (n,); entries from ``n_params`` on are buffers."""
        if self.kind == "none":
            return aggregate
        d = x.numel() if n_params is None else n_params
        gradient = x[:d] - aggregate[:d]
        m = self.state.get("m", torch.zeros_like(gradient))
        if self.kind == "momentum":
            m = self.beta1 * m + gradient
            self.state = {"m": m}
            move = m
        else:
            m = self.beta1 * m + (1 - self.beta1) * gradient
            v = self._second_moment(self.state.get("v", torch.full_like(gradient, self.tau**2)), gradient**2)
            self.state = {"m": m, "v": v}
            move = m / (v.sqrt() + self.tau)
        return torch.cat([x[:d] - self.lr * move, aggregate[d:]])

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        if self.kind == "adagrad":
            return v + square
        if self.kind == "adam":
            return self.beta2 * v + (1 - self.beta2) * square
        return v - (1 - self.beta2) * square * torch.sign(v - square)
