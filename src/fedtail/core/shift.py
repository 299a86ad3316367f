"""Are new samples like those a model was made for? Tests from counts that may be looked at as often as one likes.

Without labels, counts of new samples in bins are compared with reference counts by Fisher's exact test at every cut
(exact whatever the distribution, however small the counts), and the looks of a model's life share one error: look t
may spend alpha / (t (t + 1)), which adds up to alpha. With labels, which may come late, a bet is kept against a
promised recall: if the promise holds, a bettor's capital ever grows beyond 1 / alpha with probability at most alpha
(Ville, 1939).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp
from scipy.stats import hypergeom

STEPS, SETTLED = 500, 1e-6
"""Of the search for a class mix, at most, and the change of a share at which it ends."""
WORSE = 1.4 ** np.arange(1.0, 9.0)
"""How many times as much is missed under the alternatives to a promised recall."""


def spent(alpha: float, look: int) -> float:
    """Return the error that look number ``look`` (from 1) may spend of ``alpha`` for all looks together."""
    return alpha / (look * (look + 1))


def drift_p(reference: np.ndarray, now: np.ndarray, *, ordered: bool = True) -> float:
    """Return a p-value of "both counts come from one distribution" that is valid for any counts.

    Bins in order are tested at each cut, others each against all the rest, both sides, with Bonferroni's correction.
    reference, now: (B,) counts.
    """
    a, b = np.asarray(reference, dtype=np.int64), np.asarray(now, dtype=np.int64)
    n, m = int(a.sum()), int(b.sum())
    if not n or not m:
        return 1.0
    left, mine = (np.cumsum(a)[:-1], np.cumsum(b)[:-1]) if ordered else (a, b)
    both = left + mine
    kept = (both > 0) & (both < n + m)
    mine, both = mine[kept], both[kept]
    if not len(both):
        return 1.0
    low, high = hypergeom.cdf(mine, n + m, both, m), hypergeom.sf(mine - 1, n + m, both, m)
    return float(min(1.0, 2 * len(both) * min(low.min(), high.min())))


def class_mix(p: np.ndarray, shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """(C,) class shares among new samples, by expectation maximization from calibrated probabilities.

    Saerens, Latinne and Decaestecker (2002). p: (N, C) probabilities of a model whose classes had ``shares`` (C,).
    """
    old = np.asarray(shares, dtype=np.float64)
    new = old.copy()
    for _ in range(STEPS):
        step = mix_step(p, old, new) / max(len(p), 1)
        if np.abs(step - new).max() < SETTLED:
            return np.asarray(step)
        new = step
    return new


def prior_weights(p: np.ndarray, shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """(C,) factors of probabilities after which the model expects as many of each class as there are.

    Training on resampled classes leaves probabilities that stand for another class mix than that of the samples; with
    these factors, found on labelled samples with ``shares``, they stand for theirs. p: (N, C).
    """
    wanted, weights = np.asarray(shares, dtype=np.float64), np.ones(p.shape[1])
    for _ in range(STEPS):
        step = wanted / np.maximum(mix_step(p, np.ones(len(wanted)), weights) / len(p), SETTLED)
        weights = weights * step / step[0]
        if np.abs(step - 1).max() < SETTLED:
            break
    return weights


def mix_step(p: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """(C,) expected samples of each class if the shares were ``new`` instead of ``old``: adds up over sites."""
    odds = np.asarray(p, dtype=np.float64) * (new / old)
    return np.asarray((odds / odds.sum(1, keepdims=True)).sum(0))


def evidence_of_loss(found: int, missed: int, recall: float) -> float:
    """Return the log of the evidence that less than the share ``recall`` (below 1) is found.

    It is the likelihood of the counts of a model's whole life, averaged over larger shares that are missed, against
    that at ``recall``. The claim is given up where it reaches log(1 / alpha).
    """
    worse = (1 - recall) * WORSE
    worse = np.append(worse[worse < 1], 1 - recall / 2)
    ratios = missed * np.log(worse / (1 - recall)) + found * np.log((1 - worse) / recall)
    return float(logsumexp(ratios) - np.log(len(ratios)))
