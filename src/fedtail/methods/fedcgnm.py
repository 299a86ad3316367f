"""FedCGNM: class-grouped normalized momentum (paper section 3.1, algorithm 1).

At a client, for each group h of classes (grouped by least within-group variance of resampled proportions):

    m_h <- beta m_h + (1 - beta) g_h,      m_h = 0 at the start of every round
    x   <- x - lr [ sum_h m_h / (||m_h|| + delta) + weight_decay x ]

Momentum is never sent and never carried over a round: on the wire it is FedAvg.

With ``length = "natural"`` each group's momentum is brought to the mean L of the groups' lengths instead of to 1:
groups weigh the same, and a step is as long as the gradients are. Then ``delta`` is a share of L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedtail.core.grouping import DISPERSIONS, group_classes
from fedtail.core.momentum import Scalar, cgnm_direction, normalizers
from fedtail.core.records import Tensors
from fedtail.errors import FedtailError, check_range, one_of
from fedtail.methods.base import LocalRun, LocalStep, Method
from fedtail.methods.registry import METHODS

LENGTHS = ("unit", "natural")


@METHODS.add("fedcgnm")
@dataclass(frozen=True)
class FedCGNM(Method):
    """The paper's optimizer. ``threshold`` fixes the number of minority classes instead of the rule."""

    title = "FedCGNM"
    paper = "Park et al., Class-Grouped Normalized Momentum and Faster Hyperparameter Exploration, ICML 2026"
    tunable = ("weight_decay", "beta", "delta")
    group_momentum = True
    averaged = "momentum"

    n_groups: int | None = 2
    """H; None gives every class its own group."""
    beta: float = 0.5
    """Momentum factor in [0, 1)."""
    delta: float = 0.1
    """Stabiliser added to each norm."""
    length: str = "unit"
    """What each group's momentum is brought to: ``unit`` length, or the mean of the groups' lengths (``natural``)."""
    dispersion: str = "variance"
    threshold: int | None = None
    """If set (with H = 2): the minority group is the ``threshold`` locally rarest classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.beta", self.beta, 0.0, 1.0, open_high=True)
        check_range("method.delta", self.delta, 0.0)
        if self.length not in LENGTHS:
            raise one_of("method.length", self.length, LENGTHS)
        if self.n_groups is not None:
            check_range("method.n_groups", self.n_groups, 1)
        if self.dispersion not in DISPERSIONS:
            raise one_of("method.dispersion", self.dispersion, DISPERSIONS)
        if self.threshold is not None and (self.n_groups != 2 or self.threshold < 0):
            raise FedtailError(f"method.threshold = {self.threshold} needs n_groups = 2 and a value of 0 or more")

    def group_count(self, n_classes: int) -> int:
        return n_classes if self.n_groups is None else self.n_groups

    def groups(self, resampled: np.ndarray) -> np.ndarray:
        if self.threshold is None:
            counts = np.asarray(resampled, dtype=np.float64).tobytes()
            return _grouped(counts, self.group_count(len(resampled)), self.dispersion)
        order = np.lexsort((np.arange(len(resampled)), -np.asarray(resampled)))
        out = np.zeros(len(resampled), dtype=np.int64)
        out[order[max(len(order) - self.threshold, 0) :]] = 1
        return out

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        shape = (self.group_count(len(run.counts)), run.n_params)
        return {}, {"momentum": torch.zeros(shape, device=run.device)}

    def direction(self, step: LocalStep) -> tuple[Tensor, Tensors]:
        hyper, natural = step.hyper, self.length == "natural"
        direction, momentum = cgnm_direction(step.state["momentum"], step.grads, hyper["beta"], hyper["delta"], natural)
        return direction, {**step.state, "momentum": momentum}

    def average_factors(self, average: Tensor, hyper: Mapping[str, Scalar]) -> Tensor:
        return normalizers(average, hyper["delta"], self.length == "natural")

    def bound(self, lr: float, steps: int, n_classes: int) -> float | None:
        if self.weight_decay or self.length == "natural":  # as long as gradients are, which has no bound
            return None
        return lr * steps * self.group_count(n_classes)


@lru_cache(maxsize=4096)
def _grouped(counts: bytes, n_groups: int, dispersion: str) -> np.ndarray:
    """Return the groups of classes with so many samples. Clients ask every round."""
    return group_classes(np.frombuffer(counts), n_groups, dispersion=dispersion)


@METHODS.add("fedcgn")
@dataclass(frozen=True)
class FedCGN(FedCGNM):
    """x <- x - lr sum_h g_h / (||g_h|| + delta)."""

    title = "FedCGN"
    beta: float = 0.0
