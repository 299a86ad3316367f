"""Class-weighted cross-entropy (Aurelio et al., 2019).

    w_c = (n / (C n_c))^power over the C classes present,   loss of a batch = sum_i w_{y_i} CE_i / sum_i w_{y_i}

as ``torch.nn.CrossEntropyLoss(weight=)`` has it. Divided by the number of samples instead (``normalize = false``),
steps grow with the weights, which reach hundreds for clients with few samples of a class, and training diverges at
learning rates that suit every other method.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.errors import check_range, one_of
from fedtail.methods.base import Batch, LocalRun, Method, cross_entropy, pick, relative
from fedtail.methods.registry import METHODS

WEIGHT_COUNTS = ("original", "resampled")


@dataclass(frozen=True)
class Weighted(Method):
    """Cross-entropy weighted by class, with weights from the client's own counts.

    Of the samples it trains on. Inverse frequencies of these give every class the same mass; those of *original* counts
    on top of resampling at rate r give class c a mass proportional to n_c^(-r): they invert the imbalance, and results
    fall far below the paper's.
    """

    whole_batch = True

    weight_counts: str = "resampled"
    """``resampled`` or ``original`` class counts."""
    normalize: bool = True
    """Divide a batch's weighted loss by its sum of weights, as torch does, and not by its number of samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_counts not in WEIGHT_COUNTS:
            raise one_of("method.weight_counts", self.weight_counts, WEIGHT_COUNTS)

    def class_weights(self, counts: np.ndarray) -> np.ndarray:
        """(C,) float64 weights, 0 for classes without samples."""
        raise NotImplementedError

    def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
        counts = run.counts if self.weight_counts == "original" else run.resampled
        weights = torch.as_tensor(self.class_weights(counts), dtype=torch.float32, device=run.device)
        return {"class_weight": weights}, {}

    def sample_weights(self, batch: Batch, const: Tensors) -> Tensor:
        """(..., B) factor of each sample's loss."""
        weight = pick(const["class_weight"], batch.y)
        return relative(weight, batch) if self.normalize else weight

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        return self.sample_weights(batch, const) * cross_entropy(logits, batch.y), state


def inverse_frequency(counts: np.ndarray, power: float) -> np.ndarray:
    """(C,) float64 powers of n / (C n_c) over the C classes present, 0 for the others."""
    n = np.asarray(counts, dtype=np.float64)
    present = n > 0
    weights = np.zeros_like(n)
    weights[present] = (n.sum() / (present.sum() * n[present])) ** power
    return weights


@METHODS.add("weighted_ce")
@dataclass(frozen=True)
class WeightedCE(Weighted):
    """Inverse frequencies as weights, or a power of them."""

    title = "Weighted CE"
    paper = (
        "Aurelio et al., Learning from Imbalanced Data Sets with Weighted Cross-Entropy Function, "
        "Neural Processing Letters 2019"
    )

    power: float = 1.0
    """Of the inverse frequencies: 1 gives every class the same mass, .5 is their square root, 0 plain cross-entropy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.power", self.power, 0.0)

    def class_weights(self, counts: np.ndarray) -> np.ndarray:
        return inverse_frequency(counts, self.power)
