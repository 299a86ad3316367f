"""FedProx (Li et al., 2020): a proximal term holds local models near the global one.

    x_k <- x_k - lr (g + mu (x_k - x))

The gradient of (mu / 2) ||x_k - x||^2, squared; the first local step is FedAvg's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedtail.core.momentum import like
from fedtail.core.records import Tensors
from fedtail.errors import check_range
from fedtail.methods.base import LocalStep, Method
from fedtail.methods.registry import METHODS


@METHODS.add("fedprox")
@dataclass(frozen=True)
class FedProx(Method):
    """``mu = 0`` is FedAvg. The authors search mu in {0.001, 0.01, 0.1, 0.5, 1}."""

    title = "FedProx"
    paper = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    tunable = ("weight_decay", "mu")

    mu: float = 0.01
    """Strength of the pull towards the global model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.mu", self.mu, 0.0)

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        pull = like(step.hyper["mu"], step.x) * (step.x - step.x0)
        return step.grads.sum(dim=-2) + pull, step.state
