"""How client updates agree, and how far rates wander."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike


def alignment(gram: ArrayLike, weights: ArrayLike) -> float:
    """mean_k cos(u_k, sum_j p_j u_j): 1 for identical updates, 1/sqrt(K) for K orthogonal equal-norm ones.

    gram: (K, K) inner products of the updates, which a GPU can compute where the updates are.
    """
    g, p = np.asarray(gram, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    norms = np.sqrt(np.diag(g)) * np.sqrt(max(float(p @ g @ p), 0.0))
    each = (g @ p)[norms > 0] / norms[norms > 0]
    return float(each.mean()) if each.size else float("nan")


def path_variation(rates: ArrayLike, weights: ArrayLike) -> np.ndarray:
    """(T,) V_t = sum over rounds up to t of sum_k p_k |r_k^t - r_k^(t-1)|, with r^(-1) := r^0; rates (T, K)."""
    r, p = np.asarray(rates, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    steps = [0.0, *(float(np.abs(now - last) @ p) for last, now in itertools.pairwise(r))]  # no second (T, K) array
    return np.cumsum(steps[: len(r)])
