"""From probabilities to answers: a temperature that makes them mean something, and rules that fit the cost of a miss.

A rare class is found by a threshold, not by an argmax. What a rule needs is in the counts of ``core.scores``, so that
it can be chosen from what sites add up, after training and without training again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedtail.core.scores import TEMPERATURES, Scores, bin_edges, precision_at_recall


@dataclass(frozen=True)
class Decision:
    """How a model's probabilities become answers; the default is the largest probability."""

    temperature: float = 1.0
    """Probabilities are taken to the power 1 / temperature and normalized again."""
    weights: tuple[float, ...] = ()
    """(C,) the answer is the class with the largest weight times probability."""
    costs: tuple[tuple[float, ...], ...] = ()
    """(C, C) what it costs to call a sample of class i class j: the answer with the least expected cost."""
    target: int | None = None
    """A class that is the answer wherever its probability reaches ``threshold``; elsewhere the best of the others."""
    threshold: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether it changes nothing."""
        return self == Decision()

    def probabilities(self, p: np.ndarray) -> np.ndarray:
        """(N, C) calibrated probabilities."""
        if self.temperature == 1.0:
            return p
        powered = np.maximum(p, 1e-12) ** (1 / self.temperature)
        return np.asarray(powered / powered.sum(-1, keepdims=True))

    def answers(self, p: np.ndarray) -> np.ndarray:
        """(N,) classes, from calibrated probabilities (N, C)."""
        if self.costs:
            return np.asarray((p @ np.asarray(self.costs)).argmin(-1))
        score = p * np.asarray(self.weights) if self.weights else p
        if self.target is None:
            return np.asarray(score.argmax(-1))
        others = score.copy()
        others[:, self.target] = -1.0
        return np.where(p[:, self.target] >= self.threshold, self.target, others.argmax(-1))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Decision:
        given = dict(fields)
        given["weights"] = tuple(float(w) for w in given.get("weights", ()))
        given["costs"] = tuple(tuple(float(v) for v in row) for row in given.get("costs", ()))
        return cls(**given)


@dataclass(frozen=True)
class Decisions:
    """The decision of a model, and those of sites that have one of their own."""

    common: Decision = field(default_factory=Decision)
    sites: Mapping[int, Decision] = field(default_factory=dict)
    """client -> its own."""

    def at(self, client: int) -> Decision:
        return self.sites.get(client, self.common)

    @property
    def plain(self) -> bool:
        """Whether they change nothing anywhere."""
        return self.common.plain and all(one.plain for one in self.sites.values())


def best_temperature(scores: Scores) -> float:
    """The temperature with the least log loss, by a parabola through the best of the grid and its neighbours."""
    loss = scores.tempered.astype(np.float64)
    i = int(loss.argmin())
    log = np.log2(TEMPERATURES)
    if not 0 < i < len(loss) - 1:
        return float(TEMPERATURES[i])
    left, here, right = loss[i - 1 : i + 2]
    bend = left - 2 * here + right
    shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return float(2 ** (log[i] + shift * (log[i + 1] - log[i])))


def f1_weights(scores: Scores) -> tuple[float, ...]:
    """(C,) one over the threshold at which each class, against the rest, has its best F1: the answer is then the class
    that lies furthest above its own threshold. Classes without samples keep the mean."""
    thresholds = np.full(len(scores.bins), np.nan)
    for c, (others, mine) in enumerate(scores.bins):
        if mine.sum():
            hit, called = np.cumsum(mine[::-1])[::-1], np.cumsum((others + mine)[::-1])[::-1]
            f1 = 2 * hit / np.maximum(called + mine.sum(), 1)
            thresholds[c] = max(float(bin_edges()[int(f1.argmax())]), 1e-6)
    weights = 1 / thresholds
    weights = np.where(np.isfinite(weights), weights, np.nanmean(weights))
    return tuple(float(w) for w in weights / weights.mean())


def recall_threshold(scores: Scores, target: int, recall: float) -> float:
    """The highest threshold that finds a share ``recall`` of the class; 0 if the class has no samples to go by."""
    _, threshold = precision_at_recall(scores.bins[target], recall)
    return 0.0 if np.isnan(threshold) else threshold
