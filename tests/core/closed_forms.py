"""Formulas of the paper in closed form, which what the package does is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def resampled_proportions(counts: ArrayLike, rate: float) -> np.ndarray:
    """(C,) closed form q_c^(1-r) / sum_s q_s^(1-r); 0 for absent classes."""
    n = np.asarray(counts, dtype=np.float64)
    q = np.zeros_like(n)
    q[n > 0] = n[n > 0] ** (1.0 - rate)
    return q / q.sum() if q.sum() > 0 else q


def within_group_scatter(proportions: ArrayLike, groups: ArrayLike) -> float:
    """J = sum_h sum_{c in G_h} (q_c - mu_h)^2 over the classes that have samples."""
    q, g = np.asarray(proportions, dtype=np.float64), np.asarray(groups)
    return float(sum(((q[m] - q[m].mean()) ** 2).sum() for h in np.unique(g) if (m := (g == h) & (q > 0)).any()))
