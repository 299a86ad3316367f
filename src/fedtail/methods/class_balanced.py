"""Class-balanced loss (Cui et al., 2019): weights by the effective number of samples.

    w_c = (1 - b) / (1 - b^{n_c}),  rescaled to sum to the number of classes present

b = 0 weighs all classes alike, b -> 1 by inverse frequency. A batch's loss is divided by its sum of weights, as in
``weighted_ce``; the authors divide by the number of samples (``normalize = false``). Three losses are weighted, as in
the authors' code (class-balanced-loss 1d78572): softmax cross-entropy, sigmoid cross-entropy summed over outputs, and
its focal form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.records import Tensors
from fedtail.errors import check_range, one_of
from fedtail.methods.base import Batch, cross_entropy, one_hot
from fedtail.methods.registry import METHODS
from fedtail.methods.weighted_ce import Weighted

VARIANTS = ("softmax", "sigmoid", "focal")


@METHODS.add("class_balanced")
@dataclass(frozen=True)
class ClassBalanced(Weighted):
    """Weights from the client's own counts; see ``Weighted`` for ``weight_counts`` and ``normalize``."""

    title = "Class-balanced"
    paper = "Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019"

    b: float = 0.9999
    """Share of a sample's neighbourhood that further samples do not add; in [0, 1)."""
    variant: str = "softmax"
    """``softmax``, ``sigmoid`` or ``focal`` (sigmoid with focusing exponent ``gamma``)."""
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.b", self.b, 0.0, 1.0, open_high=True)
        check_range("method.gamma", self.gamma, 0.0)
        if self.variant not in VARIANTS:
            raise one_of("method.variant", self.variant, VARIANTS)

    def class_weights(self, counts: np.ndarray) -> np.ndarray:
        n = np.asarray(counts, dtype=np.float64)
        present = n > 0
        weights = np.zeros_like(n)
        with np.errstate(divide="ignore"):
            weights[present] = (1 - self.b) / -np.expm1(n[present] * np.log(self.b))
        return weights * (present.sum() / weights.sum()) if present.any() else weights

    def loss(self, logits: Tensor, batch: Batch, const: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        weight = self.sample_weights(batch, const)
        if self.variant == "softmax":
            return weight * cross_entropy(logits, batch.y), state
        target = one_hot(batch.y, logits.shape[-1]).to(logits.dtype)
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        if self.variant == "focal":  # (1 - p_t)^gamma with p_t the sigmoid probability of the right answer
            each = (-self.gamma * (F.softplus(-logits) + target * logits)).exp() * each
        return weight * each.sum(dim=-1), state
