"""Resampling of a client's data at rate r (paper section 3).

Class c is replicated by f_c = (max_s q_s / q_c)^r, which leaves proportions q_c^(1-r) / sum_s q_s^(1-r).
Replication is fractional: every sample appears floor(f_c) times per epoch and a fresh random subset once
more, so that class sizes are exact in every epoch and continuous in r, and no head sample is left out.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from fedtail.errors import FedtailError, one_of

EPOCH_LENGTHS = ("inflated", "original")


def replication_factors(counts: ArrayLike, rate: float) -> np.ndarray:
    """(C,) f_c >= 1 for classes with samples, 0 for absent ones (rates above 1 invert the imbalance)."""
    n = np.asarray(counts, dtype=np.float64)
    if n.ndim != 1 or np.any(n < 0) or not np.all(np.isfinite(n)):
        raise FedtailError("class counts must be a vector of finite, non-negative numbers")
    if not (math.isfinite(rate) and rate >= 0):
        raise FedtailError(f"resampling rate {rate!r} must be at least 0")
    present = n > 0
    factors = np.zeros_like(n)
    if present.any():
        factors[present] = (n.max() / n[present]) ** rate
    return factors


def resampled_counts(counts: ArrayLike, rate: float) -> np.ndarray:
    """(C,) exact class sizes of one resampled epoch.

    >>> resampled_counts([100, 10], 0.5)
    array([100,  32])
    """
    n = np.asarray(counts, dtype=np.int64)
    whole, extra = _copies(n.tobytes(), float(rate))
    return n * whole + extra


@lru_cache(maxsize=4096)
def _copies(counts: bytes, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(C,) how often every sample of a class appears, and how many samples once more. Clients ask every round."""
    n = np.frombuffer(counts, dtype=np.int64)
    factors = replication_factors(n, rate)
    whole = np.floor(factors).astype(np.int64)
    return whole, np.rint(n * (factors - whole)).astype(np.int64)


def resample_epoch(
    labels: np.ndarray,
    rate: float,
    rng: np.random.Generator,
    *,
    n_classes: int | None = None,
    epoch_length: str = "inflated",
) -> np.ndarray:
    """Shuffled positions into ``labels`` for one epoch at ``rate``.

    ``epoch_length="inflated"`` is the paper's: higher rates take more steps. ``"original"`` draws
    ``len(labels)`` of those positions, so that every rate takes the same number of steps.
    """
    labels = np.asarray(labels)
    counts = np.bincount(labels, minlength=n_classes or 0)
    whole, extra = _copies(counts.tobytes(), float(rate))
    if not extra.any() and whole.max(initial=0) <= 1:
        epoch = np.arange(len(labels))
    else:  # class by class, each in random order, so that the first members can get the extra copies
        ranked = np.argsort(labels + rng.random(len(labels)))
        y = labels[ranked]
        rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[y]
        epoch = np.repeat(ranked, whole[y] + (rank < extra[y]))
    rng.shuffle(epoch)
    if epoch_length == "original":
        return epoch[: len(labels)]
    if epoch_length != "inflated":
        raise one_of("epoch_length", epoch_length, EPOCH_LENGTHS)
    return epoch
