"""Are new samples like those a model was made for? Tests from counts that may be looked at as often as one likes.

Without labels, counts of new samples in bins are compared with reference counts by Fisher's exact test at every cut
(exact whatever the distribution, however small the counts), and the looks of a model's life share one error: look t
may spend alpha / (t (t + 1)), which adds up to alpha. With labels that come late, a bet is kept against the claim (a
recall of at least 95 %, honest probabilities): the capital of a bettor ever grows beyond 1 / alpha with probability at
most alpha if the claim is true (Ville, 1939; Waudby-Smith and Ramdas, 2024).
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
STAKES = 2.0 ** -np.arange(1.0, 8.0)
"""What is bet on an answer's error, the capital being split evenly: large stakes notice a large change soon, small ones
a small change at all."""


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


def evidence_of_bias(errors: np.ndarray) -> np.ndarray:
    """(2 S,) summed log gains of bets that answers are better, or worse, than their probabilities say.

    Sums of sites add up; ``bias_evidence`` makes one figure of them. errors: (N,) 1 or 0 for right or wrong, minus the
    probability of the answer.
    """
    bets = np.concatenate([STAKES, -STAKES])[:, None]
    return np.asarray(np.log1p(bets * np.asarray(errors, dtype=np.float64)).sum(1))


def bias_evidence(gains: np.ndarray) -> float:
    """Return the log of the evidence in the summed gains of ``evidence_of_bias``."""
    return float(logsumexp(gains) - np.log(len(gains)))
