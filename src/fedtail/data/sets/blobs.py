"""Gaussian blobs: one isotropic cluster per class, with a long tail and a known Bayes-like difficulty."""

from __future__ import annotations

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples
from fedtail.data.longtail import long_tail_counts
from fedtail.data.registry import DATASETS, Pooled
from fedtail.errors import check_range


@DATASETS.add("blobs")
def blobs(
    n_classes: int = 5,
    n_features: int = 10,
    n_max: int = 500,
    imbalance: float = 20.0,
    spread: float = 1.0,
    test_per_class: int = 100,
    seed: int = 0,
) -> Pooled:
    """Class centres are standard normal times 2; samples scatter around them with ``spread``."""
    check_range("n_classes", n_classes, 2)
    check_range("spread", spread, 0.0, open_low=True)
    rng = generator(seed, "blobs")
    centres = 2.0 * rng.standard_normal((n_classes, n_features))

    def draw(counts: np.ndarray) -> Samples:
        y = np.repeat(np.arange(n_classes), counts)
        x = centres[y] + spread * rng.standard_normal((len(y), n_features))
        return Samples(torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y))

    return Pooled(
        draw(long_tail_counts(n_max, n_classes, imbalance)),
        draw(np.full(n_classes, test_per_class)),
        classes=tuple(f"class {c}" for c in range(n_classes)),
        name="blobs",
        model="mlp",
        model_options={"hidden": (32, 16)},
    )
