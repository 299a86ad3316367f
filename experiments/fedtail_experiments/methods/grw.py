"""Generalized re-weighting (Zhang et al., 2021): the weighting twin of logit adjustment.

    w_c proportional to (1 / pi_c)^rho,  rescaled to sum to the number of classes present

with pi the client's own *resampled* class proportions. rho = 0 is cross-entropy, rho = 1 inverse frequency. A batch's
loss is divided by its sum of weights, as in ``weighted_ce``. The authors weigh in a second stage that trains the
classifier alone, with rho of 0.8 or 1.2; here there is one stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtail.errors import check_range
from fedtail.methods.weighted_ce import Weighted, inverse_frequency


@dataclass(frozen=True)
class GRW(Weighted):
    """Weights from the client's own counts; see ``Weighted``."""

    title = "GRW"
    paper = "Zhang et al., Distribution Alignment: A Unified Framework for Long-Tail Visual Recognition, CVPR 2021"

    rho: float = 1.0
    """Exponent: 0 no weighting, 1 inverse frequency."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.rho", self.rho, 0.0)

    def class_weights(self, counts: np.ndarray) -> np.ndarray:
        weights = inverse_frequency(counts, self.rho)
        return weights * (np.count_nonzero(weights) / weights.sum()) if weights.any() else weights
