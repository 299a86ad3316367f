"""Make a balanced set long-tailed: N_c = int(N_max xi^(-c/(C-1)))."""

from __future__ import annotations

import numpy as np

from fedtail.core.random import generator
from fedtail.errors import check_range


def long_tail_counts(n_max: int, n_classes: int, imbalance: float) -> np.ndarray:
    """(C,) exponential profile from ``n_max`` (class 0) down to ``n_max / imbalance``.

    >>> long_tail_counts(5000, 10, 20).tolist()
    [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250]
    """
    check_range("imbalance", imbalance, 1.0)
    c = np.arange(n_classes) / max(n_classes - 1, 1)
    return (n_max * imbalance**-c + 1e-9).astype(np.int64)


def long_tail_index(y: np.ndarray, imbalance: float, *, n_classes: int, seed: int = 0) -> np.ndarray:
    """Indices of a long-tailed subset, ascending; class 0 stays whole as far as the rarest class allows."""
    y = np.asarray(y)
    rng = generator(seed, "longtail")
    profile = long_tail_counts(int(np.bincount(y, minlength=n_classes).max()), n_classes, imbalance)
    keep = [rng.permutation(np.flatnonzero(y == c))[: profile[c]] for c in range(n_classes)]
    return np.sort(np.concatenate(keep))
