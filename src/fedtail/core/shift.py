"""Are new samples like those a model was made for? Tests from counts that may be looked at as often as one likes.

Without labels, counts of new samples in bins are compared with reference counts by Fisher's exact test at every cut
(valid whatever the distribution, however small the counts), and the looks of a model's life share one error: look t
may spend alpha / (t (t + 1)), which adds up to alpha. With labels, which may come late, a bet is kept against a
promised recall: if the promise holds, a bettor's capital ever grows beyond 1 / alpha with probability at most alpha
(Ville, 1939).
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, logsumexp

STEPS, SETTLED = 500, 1e-6
"""Of the search for a class mix, at most, and the change of a share at which it ends."""
PRIOR = 20.0
"""Samples of a class that its density in cells is smoothed by."""
WORSE = 1.4 ** np.arange(1.0, 9.0)
"""How many times as much is missed under the alternatives to a promised recall."""


def spent(alpha: float, look: int) -> float:
    """Return the error that look number ``look`` (from 1) may spend of ``alpha`` for all looks together."""
    return alpha / (look * (look + 1))


def drift_p(reference: np.ndarray, now: np.ndarray, *, ordered: bool = True) -> np.ndarray:
    """Return p-values of "both counts come from one distribution" that are valid for any counts.

    Bins in order are tested at each cut, others each against all the rest, both sides, with Bonferroni's correction.
    reference, now: (..., B) counts.
    """
    a, b = np.asarray(reference, dtype=np.int64), np.asarray(now, dtype=np.int64)
    n, m = a.sum(-1, keepdims=True), b.sum(-1, keepdims=True)
    left, right = (np.cumsum(a, -1)[..., :-1], np.cumsum(b, -1)[..., :-1]) if ordered else (a, b)
    both = left + right
    kept = (both > 0) & (both < n + m) & (n > 0) & (m > 0)
    p = np.where(kept, np.minimum(tail(left, right, n, m), tail(right, left, m, n)), 1.0)
    return np.asarray(np.minimum(1.0, 2 * np.maximum(kept.sum(-1), 1) * p.min(-1, initial=1.0)))


def tail(few: np.ndarray, many: np.ndarray, n: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Return the chance that of ``few + many`` hits among ``n + m`` samples ``many`` or more fall on the ``m``.

    This is one side of Fisher's exact test, from above: the probabilities of ever more hits fall at least as fast as
    a geometric series with the ratio of the first two, whose sum is taken (within 12 % below .001).
    """
    clear, others = m - many, n - few
    room = gammaln(few + many + 1) + gammaln(clear + others + 1) + gammaln(n + 1) + gammaln(m + 1) - gammaln(n + m + 1)
    first = np.exp(room - sum(gammaln(v + 1) for v in (few, many, clear, others)))
    ratio = few * clear / ((many + 1.0) * (others + 1.0))
    return np.asarray(np.where(ratio < 1, np.minimum(1.0, first / np.maximum(1 - ratio, 1e-9)), 1.0))


def class_mix(cells: np.ndarray, density: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(C,) class shares among new samples, without their labels, by expectation maximization over counts.

    Saerens, Latinne and Decaestecker (2002), with the share of each class's samples that fall into a cell in place of
    a density. cells: (M,) counts of new samples; density: (C, M); shares: (C,) those to begin with.
    """
    seen = (density > 0).any(0) & (cells > 0)
    n, inside, new = cells[seen], density[:, seen], np.asarray(shares, dtype=np.float64)
    for _ in range(STEPS if n.size else 0):
        each = new[:, None] * inside
        step = (each / each.sum(0)) @ n / n.sum()
        if np.abs(step - new).max() < SETTLED:
            return np.asarray(step)
        new = step
    return new


def cell_density(truth: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """(C, M) share of each class's samples in each cell: as counted, and as ``PRIOR`` more would lie that the model
    expects.

    truth: (C, M) labelled samples by class and cell; mass: (M, C) probabilities summed over the samples of a cell.
    """
    believed = mass.T / np.maximum(mass.sum(0), 1)[:, None]
    return np.asarray((truth + PRIOR * believed) / (truth.sum(1, keepdims=True) + PRIOR))


def prior_weights(mass: np.ndarray, cells: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(C,) factors of probabilities after which the model expects as many of each class as there are.

    Training on resampled classes leaves probabilities that stand for another class mix than that of the samples; with
    these factors, found on samples with ``shares``, they stand for theirs. mass: (M, C) probabilities summed over the
    samples of a cell; cells: (M,) samples.
    """
    mean = mass[cells > 0] / mass[cells > 0].sum(1, keepdims=True)
    n, weights = cells[cells > 0], np.ones(mass.shape[1])
    for _ in range(STEPS):
        each = weights * mean
        expected = n @ (each / each.sum(1, keepdims=True)) / n.sum()
        step = shares / np.maximum(expected, SETTLED)
        weights = weights * step / step[0]
        if np.abs(step - 1).max() < SETTLED:
            break
    return weights


def evidence_of_loss(found: int, missed: int, recall: float) -> float:
    """Return the log of the evidence that less than the share ``recall`` (below 1) is found.

    It is the likelihood of the counts of a model's whole life, averaged over larger shares that are missed, against
    that at ``recall``. The claim is given up where it reaches log(1 / alpha).
    """
    worse = (1 - recall) * WORSE
    worse = np.append(worse[worse < 1], 1 - recall / 2)
    ratios = missed * np.log(worse / (1 - recall)) + found * np.log((1 - worse) / recall)
    return float(logsumexp(ratios) - np.log(len(ratios)))
