"""Grouping of classes by least within-group variance (paper section 3.2).

The classes, sorted by resampled proportion, are cut into H contiguous groups that minimise
J = sum_h |G_h| sigma_h^2: exact one-dimensional k-means, solved by a dynamic programme in O(H C^2).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedtail.errors import FedtailError, one_of

DISPERSIONS = ("variance", "std")
TIE = 1e-12
"""Partitions whose costs differ by less than this, relative to the total scatter, are ties."""


def group_classes(proportions: ArrayLike, n_groups: int = 2, *, dispersion: str = "variance") -> np.ndarray:
    """Group of each class: 0 = the most frequent classes, ``n_groups - 1`` = the rarest.

    Args:
        proportions: (C,) non-negative class proportions or counts *after* resampling; only their order
            and spacing matter (the result does not change under q -> a q + b, a > 0, on the classes present).
        n_groups: H. With fewer present classes than H the remaining groups stay empty.
        dispersion: ``"variance"`` minimises sum |G_h| sigma_h^2, the paper's rule; ``"std"`` minimises
            sum |G_h| sigma_h. Neither gives all thresholds reported in the paper at any one rate.

    Classes are ordered by (-proportion, index). Ties go to the most even group sizes, then to fewer
    minority classes: at rate 1 every split ties, and rounding noise would decide otherwise. Classes without
    samples give no gradient; they are left out of the optimisation and appended to the last group.

    >>> group_classes([0.5, 0.3, 0.1, 0.1])
    array([0, 0, 1, 1])
    """
    q = np.asarray(proportions, dtype=np.float64)
    if q.ndim != 1 or q.size == 0:
        raise FedtailError(f"proportions must be a non-empty vector, got shape {q.shape}")
    if not np.all(np.isfinite(q)) or np.any(q < 0):
        raise FedtailError("proportions must be finite and non-negative")
    if n_groups < 1:
        raise FedtailError(f"n_groups = {n_groups} is not allowed; use 1 or more")
    if dispersion not in DISPERSIONS:
        raise one_of("dispersion", dispersion, DISPERSIONS)

    groups = np.full(q.size, n_groups - 1, dtype=np.int64)
    order = np.lexsort((np.arange(q.size), -q))
    order = order[q[order] > 0]
    if order.size <= n_groups:  # every present class is a group of its own
        groups[order] = np.arange(order.size)
        return groups
    for h, members in enumerate(np.split(order, _cuts(q[order], n_groups, dispersion))):
        groups[members] = h
    return groups


def _cuts(values: np.ndarray, n_groups: int, dispersion: str) -> list[int]:
    """Positions of the H - 1 cuts of ``values``, which are positive and in descending order."""
    n = values.size
    snapped = np.round(values / values[0], 12)  # equal up to rounding is equal
    centred = snapped - snapped.mean()
    scale = np.abs(centred).max() if snapped[0] > snapped[-1] else 0.0
    z = centred / scale if scale > 0 else np.zeros(n)  # J is scale-equivariant; this keeps float64 exact enough
    p, s = np.concatenate([[0.0], z.cumsum()]), np.concatenate([[0.0], (z * z).cumsum()])
    tol = TIE * max(float(s[-1]), 1.0)

    # cost[i, j] of the group of classes i+1..j, for i < j
    i, j = np.triu_indices(n + 1, 1)
    sums = s[j] - s[i] - (p[j] - p[i]) ** 2 / (j - i)
    sums[sums <= tol] = 0.0  # rounding, which a square root would lift above any tolerance
    cost = np.full((n + 1, n + 1), np.inf)
    cost[i, j] = sums if dispersion == "variance" else np.sqrt(sums * (j - i))

    # best[h][j]: (cost, unevenness, first-cut key, cuts). Among ties the sum of squared sizes is least when
    # sizes are most even; then later cuts win, i.e. fewer minority classes.
    best = cost[0].copy()
    uneven = np.arange(n + 1, dtype=np.float64) ** 2
    back: list[np.ndarray] = []
    for h in range(2, n_groups + 1):
        nxt = np.full(n + 1, np.inf)
        nxt_uneven = np.full(n + 1, np.inf)
        arg = np.zeros(n + 1, dtype=np.int64)
        for end in range(h, n + 1):
            starts = np.arange(h - 1, end)
            total = best[starts] + cost[starts, end]
            low = total.min()
            tied = starts[total <= low + tol]
            sizes = uneven[tied] + (end - tied) ** 2.0
            pick = tied[sizes == sizes.min()][-1]
            nxt[end], arg[end] = best[pick] + cost[pick, end], pick
            nxt_uneven[end] = uneven[pick] + (end - pick) ** 2.0
        best, uneven = nxt, nxt_uneven
        back.append(arg)
    cuts, end = [], n
    for arg in reversed(back):
        end = int(arg[end])
        cuts.append(end)
    return cuts[::-1]
