"""The counts that metrics are computed from: counts per class, which sites can add up, and which classes are rare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedtail.core.scores import Scores

Z = 1.96
"""Standard deviations that an interval of 95 % reaches."""
MANY, FEW = 100, 20
"""Many-shot: at least 100 training samples; few-shot: at most 20; medium between."""


@dataclass(frozen=True)
class Evidence:
    """The counts behind metrics, for one model or for many (leading dimensions)."""

    counts: np.ndarray
    """(..., 3, C) correctly classified, true and predicted samples per class, as floats."""
    background: int | None = None
    """The class that means "nothing found", where the data declare one."""
    train_counts: np.ndarray | None = None
    """(C,) training samples per class, where they are known (simulation)."""
    scores: Scores | None = None
    """Counts of probabilities, where they were taken."""
    sites: np.ndarray | None = None
    """(K,) macro F1 of each site, where sites tell it; NaN for one without samples."""

    @property
    def hit(self) -> np.ndarray:
        return np.asarray(self.counts[..., 0, :])

    @property
    def support(self) -> np.ndarray:
        return np.asarray(self.counts[..., 1, :])

    @property
    def predicted(self) -> np.ndarray:
        return np.asarray(self.counts[..., 2, :])

    @property
    def seen(self) -> np.ndarray:
        """(..., C) bool: classes with samples, which are those that averages over classes take."""
        return self.support > 0

    @property
    def recall(self) -> np.ndarray:
        """(..., C); NaN for classes without samples."""
        return ratio(self.hit, self.support, np.nan)

    @property
    def precision(self) -> np.ndarray:
        """(..., C); 0 where undefined."""
        return ratio(self.hit, self.predicted, 0.0)

    @property
    def f1(self) -> np.ndarray:
        """(..., C); 0 where undefined."""
        return ratio(2 * self.hit, self.support + self.predicted, 0.0)


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, n_classes: int) -> np.ndarray:
    """(C, C) counts; row = true class, column = predicted class."""
    y, z = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    return np.bincount(y * n_classes + z, minlength=n_classes * n_classes).reshape(n_classes, n_classes)


def shot_groups(train_counts: ArrayLike) -> dict[str, np.ndarray]:
    """Boolean masks of many / medium / few classes by *training* counts."""
    n = np.asarray(train_counts)
    return {"many": n >= MANY, "medium": (n > FEW) & (n < MANY), "few": n <= FEW}


def evidence_of(
    confusion: ArrayLike,
    train_counts: ArrayLike | None = None,
    background: int | None = None,
    scores: Scores | None = None,
    sites: ArrayLike | None = None,
) -> Evidence:
    """Return the evidence of a confusion matrix and of what was counted beside it."""
    return Evidence(
        counts=class_counts(np.asarray(confusion, dtype=np.float64)),
        background=background,
        train_counts=None if train_counts is None else np.asarray(train_counts),
        scores=scores,
        sites=None if sites is None else np.asarray(sites, dtype=np.float64),
    )


def ratio(a: np.ndarray, b: np.ndarray, undefined: float) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(b > 0, a / b, undefined)


def rarest_class(e: Evidence) -> int:
    """Return the class with the fewest training samples, or where these are not known the fewest of those scored."""
    if e.train_counts is None:
        n = np.where(e.seen, e.support, np.inf)
    else:
        n = np.asarray(e.train_counts)
    return int(np.lexsort((-np.arange(n.size), n))[0])


def area_interval(area: float, positives: int) -> tuple[float, float]:
    """Return the interval, at 95 %, of an area under a precision-recall curve; (0, 1) without positives.

    The logit interval of Boyd, Eng and Page (2013), which keeps its promise with few positives.
    """
    if not positives or not np.isfinite(area):
        return 0.0, 1.0
    share = min(max(area, 0.5 / positives), 1 - 0.5 / positives) if positives > 1 else 0.5
    middle, room = np.log(share / (1 - share)), Z / np.sqrt(positives * share * (1 - share))
    low, high = 1 / (1 + np.exp(room - middle)), 1 / (1 + np.exp(-room - middle))
    return float(min(low, area)), float(max(high, area))


def wilson(share: float, n: int) -> tuple[float, float]:
    """The interval, at 95 %, of a share seen on n samples (Wilson, 1927); (0, 1) without samples."""
    if not n:
        return 0.0, 1.0
    middle, room = share + Z * Z / (2 * n), Z * np.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return max(0.0, float((middle - room) / scale)), min(1.0, float((middle + room) / scale))


def third(e: Evidence, which: str) -> np.ndarray:
    """(C,) bool: the most or the least frequent third of the classes by training counts."""
    n = np.asarray(e.train_counts)
    order = np.lexsort((np.arange(n.size), -n))
    size = max(1, n.size // 3)
    out = np.zeros(n.size, dtype=bool)
    out[order[:size] if which == "head" else order[-size:]] = True
    return out


def class_counts(confusion: np.ndarray) -> np.ndarray:
    """(..., 3, C) correct, true and predicted samples per class from matrices (..., C, C): all that ``score`` needs."""
    return np.stack([np.diagonal(confusion, axis1=-2, axis2=-1), confusion.sum(-1), confusion.sum(-2)], axis=-2)
