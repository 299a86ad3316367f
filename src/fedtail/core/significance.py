"""Is the difference more than luck? Paired tests over seeds, honest about how little a few seeds can show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit


@dataclass(frozen=True)
class Paired:
    """A method minus the baseline, over the seeds both have run."""

    n: int
    difference: float
    low: float
    high: float
    """95 % confidence interval of the mean difference (Student's t); infinite with one seed."""
    p_t: float
    """Two-sided paired t-test; NaN with one seed."""
    p_sign_flip: float
    """Two-sided exact sign-flip permutation test, which assumes no distribution; never below 2 / 2^n."""


def paired(method: Mapping[object, float], baseline: Mapping[object, float]) -> Paired | None:
    """Compare values with the same key (seed); None if no seed is shared."""
    shared = [k for k in method if k in baseline and math.isfinite(method[k]) and math.isfinite(baseline[k])]
    if not shared:
        return None
    d = np.array([method[k] - baseline[k] for k in shared])
    n, mean = len(d), float(d.mean())
    error = float(d.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    if n == 1:
        half, p_t = math.inf, math.nan
    elif error < 1e-12:  # the same difference at every seed: the t-test would divide by zero
        half, p_t = 0.0, 1.0 if abs(mean) < 1e-12 else math.nan
    else:
        half, p_t = float(stdtrit(n - 1, 0.975)) * error, float(2 * stdtr(n - 1, -abs(mean) / error))
    flip = sign_flip(d) if n > 1 else math.nan
    return Paired(n=n, difference=mean, low=mean - half, high=mean + half, p_t=p_t, p_sign_flip=flip)


def sign_flip(differences: Sequence[float] | np.ndarray, limit: int = 16) -> float:
    """Share of the 2^n sign patterns whose mean is at least as far from 0; exact up to ``limit`` pairs.

    >>> sign_flip([0.1, 0.2, 0.3])
    0.25
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.size > limit:
        return math.nan
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=d.size)))
    means = np.abs(signs @ d)
    return float((means >= abs(d.sum()) - 1e-12).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction for several comparisons; NaN stays NaN and does not count.

    >>> holm([0.01, 0.04])
    [0.02, 0.04]
    """
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    out, worst = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * p_values[i]))
        out[i] = worst
    return out
