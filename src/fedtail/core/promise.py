"""Promises about a threshold that hold whatever the distribution of scores, from counts alone.

Let X be the scores of n samples of a class, drawn like those to come. Below the k-th smallest score lies a share of new
samples that is at most Beta(k, n + 1 - k) distributed (exactly, where scores have no ties), so that the threshold X_(k)
finds at least a share ``recall`` of them with probability P(Beta(k, n + 1 - k) <= 1 - recall) (Wilks, 1941; Guttman,
1970). The largest k for which that is at least the wanted confidence gives the fewest false alarms. Counts in bins are
enough: the lower edge of the bin that holds X_(k) lies below it, so it finds at least as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, floor, log
from typing import Any

import numpy as np
from scipy.stats import beta

from fedtail.core.evidence import wilson
from fedtail.core.scores import bin_edges


def tolerance_rank(n: int, recall: float, confidence: float) -> int:
    """Return the largest k whose k-th smallest of ``n`` scores finds ``recall`` of new samples with ``confidence``.

    0 means that no score of so few samples does.
    """
    k = np.arange(1, n + 1)
    kept = beta.cdf(1.0 - recall, k, n + 1 - k) >= confidence
    return int(np.count_nonzero(kept))  # the probability falls with k


def samples_needed(recall: float, confidence: float) -> int:
    """Return how many samples of the class a promise takes at least: 1 - recall^n must reach the confidence."""
    return ceil(log(1.0 - confidence) / log(recall) - 1e-9)


def most_promised(n: int, confidence: float) -> float:
    """Return the largest recall that ``n`` samples of the class can promise: that of their smallest score."""
    return (1.0 - confidence) ** (1.0 / n) if n else 0.0


@dataclass(frozen=True)
class Promise:
    """A threshold of one class, and what it keeps."""

    wanted: float
    """The recall asked for."""
    confidence: float
    positives: int
    """Samples of the class that it was found on."""
    threshold: float
    recall: float
    """What is promised: ``wanted``, or the most that so few samples allow."""
    needed: int
    """Samples of the class that ``wanted`` takes at least."""
    found: int
    """Samples of the class at or above the threshold."""
    alarms: int
    """Samples of other classes at or above it."""
    others: int
    """Samples of other classes."""

    @property
    def kept(self) -> bool:
        """Whether the wanted recall is promised."""
        return self.recall >= self.wanted

    @property
    def precision(self) -> float:
        """The share of alarms that are right; NaN without an alarm."""
        called = self.found + self.alarms
        return self.found / called if called else float("nan")

    @property
    def precision_interval(self) -> tuple[float, float]:
        """The interval of ``precision`` at 95 %."""
        called = self.found + self.alarms
        return wilson(self.found / max(called, 1), called)

    @property
    def alarm_interval(self) -> tuple[float, float]:
        """The interval, at 95 %, of the share of other samples that cause an alarm."""
        return wilson(self.alarms / max(self.others, 1), self.others)

    def sentence(self, name: str) -> str:
        """Say in one line what is promised of the class ``name``, and what was wanted where that is more."""
        share, sure = f"{floor(1000 * self.recall + 1e-9) / 10:g} %", f"{100 * self.confidence:g} %"
        if self.kept:
            return f"at least {share} of {name!r} are found, with {sure} confidence (from {self.positives} cases)"
        return (
            f"{self.needed} cases of {name!r} would be needed to promise {100 * self.wanted:g} % at {sure}; "
            f"there are {self.positives}; the most that can be promised is {share}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, with the intervals."""
        return {
            **asdict(self),
            "precision": None if np.isnan(self.precision) else self.precision,
            "precision_interval": list(self.precision_interval),
            "alarm_interval": list(self.alarm_interval),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Promise:
        """Read what ``to_json`` wrote."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


def promise_recall(bins: np.ndarray, wanted: float, confidence: float) -> Promise:
    """Find the highest threshold that promises the wanted recall, or the most that the samples allow.

    bins: (2, BINS) counts of the class's probability, over samples of other classes and over its own
    (``Scores.bins[c]``).
    """
    others, own = np.asarray(bins[0]), np.asarray(bins[1])
    n = int(own.sum())
    rank = tolerance_rank(n, wanted, confidence)
    place = int(np.searchsorted(np.cumsum(own), max(rank, 1))) if n else 0
    return Promise(
        wanted=wanted,
        confidence=confidence,
        positives=n,
        threshold=float(bin_edges()[place]),
        recall=wanted if rank else most_promised(n, confidence),
        needed=samples_needed(wanted, confidence),
        found=int(own[place:].sum()),
        alarms=int(others[place:].sum()),
        others=int(others.sum()),
    )


def cost_bound(confusion: np.ndarray, costs: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the mean cost of an answer and an upper bound that holds with ``confidence``, whatever the distribution.

    The bound is the empirical Bernstein inequality of Maurer and Pontil (2009). confusion, costs: (C, C), row = truth.
    """
    n = float(confusion.sum())
    if not n:
        return float("nan"), float("nan")
    mean = float((confusion * costs).sum() / n)
    span = float(costs.max() - costs.min())
    if n < 2:
        return mean, float(costs.max())
    variance = float((confusion * (costs - mean) ** 2).sum() / (n - 1))
    rest = np.log(2.0 / (1.0 - confidence))
    bound = mean + np.sqrt(2 * variance * rest / n) + 7 * span * rest / (3 * (n - 1))
    return mean, float(min(bound, costs.max()))


def set_thresholds(bins: np.ndarray, coverage: float) -> tuple[float, ...]:
    """Return a threshold per class: the sets of all classes at or above theirs hold the truth in each class with
    probability ``coverage`` (class-conditional split conformal prediction; Vovk, 2012).

    A class with too few samples gets 0 and is in every set. bins: (C, 2, BINS).
    """
    edges, out = bin_edges(), []
    for own in np.asarray(bins)[:, 1]:
        rank = int(np.floor((int(own.sum()) + 1) * (1.0 - coverage) + 1e-9))
        out.append(float(edges[np.searchsorted(np.cumsum(own), rank)]) if rank else 0.0)
    return tuple(out)


def prediction_sets(p: np.ndarray, thresholds: np.ndarray | tuple[float, ...]) -> np.ndarray:
    """(N, C) bool: which classes are in each sample's set; the likeliest class where no other would be. p: (N, C)."""
    sets = np.asarray(p) >= np.asarray(thresholds)
    empty = ~sets.any(1)
    sets[empty, np.asarray(p)[empty].argmax(1)] = True
    return sets
