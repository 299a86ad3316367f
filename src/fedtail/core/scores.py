"""What a model's probabilities are worth, from counts that sites can add up: no score of a sample leaves.

Per class, the probabilities of its own samples and of all others are counted in bins that are even in log-odds, so that
the crowded ends near 0 and 1, where rare classes live, are as finely cut as the middle. Everything is an integer
(sums in fixed point), so that the counts of sites add up exactly, in any order, and can be masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import digamma

from fedtail.core.totals import Counts

BINS, LARGEST = 4096, 18.0
"""Bins per class, over log-odds from -LARGEST to LARGEST."""
CELLS = 15
"""Equal-width bins of the calibration error, as is usual."""
ONE = 1 << 20
"""Fixed point: this many units are 1."""
TEMPERATURES = 2.0 ** np.linspace(-2, 3, 41)
"""At which the log loss is summed, so that a common temperature can be chosen."""


@dataclass(frozen=True)
class Scores(Counts):
    """Counts of one model on some samples."""

    confusion: np.ndarray
    """(C, C) row = true class."""
    bins: np.ndarray
    """(C, 2, BINS): of each class's probability, over samples of other classes and over its own."""
    cells: np.ndarray
    """(3, CELLS): of the top probability: samples, correct ones, sum of probabilities in fixed point."""
    sums: np.ndarray
    """(1 + C,) Brier score summed over samples, then each class's log loss summed over its own, in fixed point."""
    tempered: np.ndarray
    """(len(TEMPERATURES),) log loss at each temperature, summed over samples, in fixed point."""
    mass: np.ndarray
    """(C,) probability of each class summed over samples, in fixed point: how many of it the model expects."""

    @classmethod
    def of(
        cls, probabilities: np.ndarray, labels: np.ndarray, answers: np.ndarray | None = None, *, tempered: bool = True
    ) -> Scores:
        """probabilities: (N, C), rows summing to 1; labels: (N,); answers: (N,), by default the likeliest class;
        tempered: whether a temperature will be chosen by these counts."""
        p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.int64)
        n, c = p.shape
        own = np.zeros((n, c), dtype=bool)
        own[np.arange(n), y] = True
        place = (np.arange(c) * 2 + own) * BINS + bin_of(p)
        top, guess = p.max(1, initial=0.0), p.argmax(1) if n else y
        given = guess if answers is None else np.asarray(answers, dtype=np.int64)
        cell = np.minimum((top * CELLS).astype(np.int64), CELLS - 1)
        units = np.rint(top * ONE).astype(np.int64)
        cells = np.zeros((3, CELLS), dtype=np.int64)
        for row, weight in enumerate((np.ones(n, dtype=np.int64), (guess == y).astype(np.int64), units)):
            np.add.at(cells[row], cell, weight)
        log = -np.log(np.maximum(p[np.arange(n), y], 1e-12))
        return cls(
            confusion=np.bincount(y * c + given, minlength=c * c).reshape(c, c),
            bins=np.bincount(place.ravel(), minlength=2 * c * BINS).reshape(c, 2, BINS),
            cells=cells,
            sums=np.rint(np.append(((p - own) ** 2).sum(), np.bincount(y, log, c)) * ONE).astype(np.int64),
            tempered=np.rint((_tempered(p, y) if tempered else np.zeros(len(TEMPERATURES))) * ONE).astype(np.int64),
            mass=np.rint(p.sum(0) * ONE).astype(np.int64),
        )

    @property
    def n(self) -> int:
        return int(self.cells[0].sum())


def _tempered(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(len(TEMPERATURES),) summed log loss of the probabilities at each temperature."""
    log = np.log(np.maximum(p, 1e-12))
    out = np.zeros(len(TEMPERATURES))
    for i, temperature in enumerate(TEMPERATURES):
        z = log / temperature
        total = np.log(np.exp(z - z.max(1, keepdims=True, initial=-np.inf)).sum(1)) + z.max(1, initial=-np.inf)
        out[i] = (total - z[np.arange(len(y)), y]).sum()
    return out


def bin_of(p: np.ndarray) -> np.ndarray:
    """The bin of each probability."""
    q = np.clip(p, 1e-12, 1 - 1e-12)
    odds = np.clip(np.log(q) - np.log1p(-q), -LARGEST, LARGEST)
    return np.minimum(((odds + LARGEST) * (BINS / (2 * LARGEST))).astype(np.int64), BINS - 1)


def bin_edges() -> np.ndarray:
    """(BINS,) the least probability of each bin."""
    odds = np.linspace(-LARGEST, LARGEST, BINS, endpoint=False)
    edges = 1 / (1 + np.exp(-odds))
    edges[0] = 0.0
    return edges


def curve(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(thresholds, precision, recall) of calling a sample the class where its probability reaches a threshold, from the
    highest threshold down; only thresholds at which something changes. bins: (2, BINS) of one class."""
    others, mine = bins[0][::-1], bins[1][::-1]
    kept = np.flatnonzero(others + mine)
    hit, called = np.cumsum(mine)[kept], np.cumsum(others + mine)[kept]
    total = int(mine.sum())
    recall = hit / total if total else np.full(len(kept), np.nan)
    return bin_edges()[::-1][kept], hit / called, recall


def average_precision(bins: np.ndarray) -> float:
    """Area under the precision-recall curve as scikit-learn sums it; NaN without samples of the class.

    Inside a bin samples are taken as mixed evenly, so that a bin with many of both is not one big tie.
    """
    others, mine = bins[0][::-1].astype(np.float64), bins[1][::-1].astype(np.float64)
    total = mine.sum()
    if not total:
        return float("nan")
    kept = mine > 0
    hits, called = (np.cumsum(mine) - mine)[kept], (np.cumsum(others + mine) - others - mine)[kept]
    n, ratio = mine[kept], others[kept] / mine[kept]
    # The k-th own sample of a bin has precision (hits + k) / (called + k + ratio (k - 1/2)) = (hits + k) / b (k + a).
    b = 1 + ratio
    a = (called - ratio / 2) / b
    area = (n + (hits - a) * (digamma(n + 1 + a) - digamma(1 + a))) / b
    return float(area.sum() / total)


def roc_auc(bins: np.ndarray) -> float:
    """Share of pairs of one sample of the class and one of another that are in the right order; ties count half."""
    others, mine = bins[0].astype(np.float64), bins[1].astype(np.float64)
    if not others.sum() or not mine.sum():
        return float("nan")
    below = np.cumsum(others) - others
    return float((mine * (below + 0.5 * others)).sum() / (mine.sum() * others.sum()))


def calibration_error(cells: np.ndarray) -> float:
    """Expected calibration error of the top class over equal-width bins; NaN without samples."""
    n, correct, units = (row.astype(np.float64) for row in cells)
    return float(np.abs(correct - units / ONE).sum() / n.sum()) if n.sum() else float("nan")


def reliability(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean top probability, accuracy, samples) of the bins that have samples."""
    n, correct, units = (row.astype(np.float64) for row in cells)
    kept = n > 0
    return units[kept] / ONE / n[kept], correct[kept] / n[kept], n[kept]


def brier_score(scores: Scores) -> float:
    """Mean over samples of the squared distance between probabilities and the truth, summed over classes."""
    return float(scores.sums[0] / ONE / scores.n) if scores.n else float("nan")


def log_loss(scores: Scores) -> float:
    """Mean negative log-probability of the true class, cut at 1e-12."""
    return float(scores.sums[1:].sum() / ONE / scores.n) if scores.n else float("nan")


def balanced_loss(scores: Scores) -> float:
    """Mean over classes with samples of the mean negative log-probability of the true class: a rare class counts like a
    common one, and unlike balanced accuracy it sees how sure a wrong answer was."""
    n = scores.confusion.sum(1)
    return float((scores.sums[1:][n > 0] / ONE / n[n > 0]).mean()) if scores.n else float("nan")
