"""Rules for updates some of which may be hostile.

``bounded`` and ``krum`` need no more than the (S, S) inner products of the updates and give each one a factor, so that
the new model stays a linear combination: they work with FedHOO's candidates. No rule can tell who is right among two.
A median of every coordinate is not among them: a class that only two sites have is outvoted without any attacker.
"""

from __future__ import annotations

import numpy as np

TURNS, NEAR = 64, 1e-9
"""Of the search for the centre: most turns, and the share of the median distance that counts as none."""


def capped(weights: np.ndarray, most: float) -> np.ndarray:
    """Weights of the same sum of which none has more than a share ``most`` of it, nor less than an equal one must; what
    is taken goes to the others in proportion.

    >>> capped(np.array([0.8, 0.1, 0.1]), 0.5)
    array([0.5 , 0.25, 0.25])
    """
    total, there = float(weights.sum()), weights > 0
    limit = max(most, 1 / max(int(there.sum()), 1)) * total
    if (weights <= limit).all():
        return weights
    out, full = np.array(weights, dtype=np.float64), ~there
    while (more := (out > limit) & ~full).any():
        full |= more
        out[full & there] = limit
        rest = float(out[~full].sum())
        out[~full] *= (total - limit * int((full & there).sum())) / rest if rest > 0 else 1.0
    return out


def fair_share(n: int) -> float:
    """The largest share of one of ``n`` sites that only says how large it is: three equal ones but at most a quarter;
    among fewer than six sites one and a half; among two there is nobody to ask."""
    return max(min(0.25, 3 / n), 1.5 / n) if n > 2 else 1.0


def fairly(claimed: np.ndarray) -> np.ndarray:
    """Return claimed sizes or weights with none above a fair share of what all that are not 0 come to.

    >>> fairly(np.array([600.0, 100.0, 100.0, 0.0]))
    array([400., 200., 200.,   0.])
    """
    return capped(claimed, fair_share(int((claimed > 0).sum())))


def distances(gram: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """(S,) from each update to sum_j centre_j update_j. gram: (S, S) inner products."""
    return np.asarray(np.sqrt(np.maximum(np.diag(gram) - 2 * gram @ centre + centre @ gram @ centre, 0.0)))


def centre(gram: np.ndarray) -> np.ndarray:
    """(S,) coefficients, summing to 1, of the updates' geometric median, which less than half of the sites cannot move
    far. Weiszfeld's steps, from the update that is nearest to the others."""
    norms = np.diag(gram)
    apart = np.sqrt(np.maximum(norms[:, None] + norms[None] - 2 * gram, 0.0))
    out = np.zeros(len(gram))
    out[int(np.argmin(np.median(apart, axis=1)))] = 1.0
    floor = NEAR * float(np.median(apart)) + 1e-300
    for _ in range(TURNS):
        near = 1 / np.maximum(distances(gram, out), max(floor, 1e-3 * float(np.median(distances(gram, out)))))
        before, out = out, near / near.sum()
        if np.abs(out - before).max() < 1e-6:
            break
    return out


def bounded(gram: np.ndarray, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Factors s (S,) and the centre's coefficients: s_k update_k + (1 - s_k) centre is the update, drawn towards the
    centre until it is within ``reach`` times the median distance (Karimireddy et al., Learning from History for
    Byzantine Robust Optimization, ICML 2021). All 1 among fewer than three."""
    middle = centre(gram)
    if len(gram) < 3:
        return np.ones(len(gram)), middle
    apart = distances(gram, middle)
    limit = reach * float(np.median(apart))
    return np.where(apart > limit, limit / np.maximum(apart, 1e-300), 1.0), middle


def krum(gram: np.ndarray, weights: np.ndarray, suspects: int) -> np.ndarray:
    """Weights of the same sum, 0 for the ``suspects`` updates that are farthest from their nearest neighbours
    (multi-Krum: Blanchard et al., Machine Learning with Adversaries, NIPS 2017)."""
    n = len(gram)
    if n < 3 or suspects < 1:
        return weights
    norms = np.diag(gram)
    apart = np.maximum(norms[:, None] + norms[None] - 2 * gram, 0.0)
    nearest = np.sort(apart, axis=1)[:, 1 : max(n - suspects - 1, 2)]  # the first is the update itself
    kept = np.ones(n, dtype=bool)
    kept[np.argsort(nearest.sum(axis=1), kind="stable")[n - suspects :]] = False
    left = float(weights[kept].sum())
    return np.where(kept, weights * (float(weights.sum()) / left), 0.0) if left > 0 else weights


def suspected(n: int, share: float) -> int:
    """How many of ``n`` sites a share of hostile ones is: at least one, and few enough that most are left."""
    return min(max(round(share * n), 1), (n - 1) // 2)
