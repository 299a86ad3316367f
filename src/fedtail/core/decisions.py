"""From probabilities to answers: calibration that makes them mean something, and rules that fit the cost of a miss.

A rare class is found by a threshold, not by an argmax. What a common rule needs is in the counts of ``core.scores``, so
that it can be chosen from what sites add up, after training and without training again. What a site changes of it for
itself, it finds on its private split, where nothing has to leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedtail.core.evidence import confusion_matrix, evidence_of
from fedtail.core.metrics import METRICS
from fedtail.core.promise import Promise, promise_recall, set_thresholds
from fedtail.core.scores import ONE, TEMPERATURES, Scores

POWERS = (0.0, -0.2, 0.2, -0.4, 0.4, -0.6, 0.6, -0.8, 0.8, -1.0, 1.0)
"""How far answers are moved towards rare classes: probabilities are divided by the class's share to this power, 0 for
the likeliest class, 1 for the class that is likeliest against its share. Below 0 they are moved away from them, of
which a model trained on resampled data predicts too many. Of equals the first counts, which moves least."""
NOISE = 1.0
"""Standard errors of its gain that are taken off what a power reaches on validation: of a few rows of a rare class, the
best of eleven powers is best by luck, and one site pays for it (``benchmarks/choices.py decisions``)."""
EQUAL = 1.0
"""The power that finds most on average over classes, and is right most often where all will be met equally often."""
PRIOR_SAMPLES, CURVE_SAMPLES = 30.0, 1000.0
"""Samples of its own that the common finding counts as at a site: for its class mix, for its power, and, in samples
of the class to find, for its threshold. Small splits overfit: without, thresholds make the worst site worse."""
COVERAGES = (0.8, 0.9, 0.95, 0.98, 0.99)
"""How often sets of classes may be asked to hold the truth."""
ENOUGH = 50
"""Samples of every class from which on a site has sets of its own."""
TINY = 1e-12


@dataclass(frozen=True)
class Decision:
    """How a model's probabilities become answers; the default is the largest probability."""

    temperature: float = 1.0
    """Log-probabilities are divided by it."""
    bias: tuple[float, ...] = ()
    """(C,) then added to them, before they are normalized again: vector scaling, or a site's own class mix."""
    weights: tuple[float, ...] = ()
    """(C,) the answer is the class with the largest weight times probability."""
    costs: tuple[tuple[float, ...], ...] = ()
    """(C, C) what it costs to call a sample of class i class j: the answer with the least expected cost."""
    thresholds: tuple[float | None, ...] = ()
    """(C,) a class that has one is the answer wherever its probability reaches it (of several the one that lies
    furthest above its own), and nowhere else."""
    promise: Promise | None = None
    """What is promised of the class with a threshold."""
    sets: tuple[tuple[float, ...], ...] = ()
    """(len(COVERAGES), C) the least probability of each class in a set that covers it so often."""

    @property
    def plain(self) -> bool:
        """Whether it gives the likeliest class by probabilities as they are."""
        return replace(self, promise=None, sets=()) == Decision()

    @property
    def target(self) -> int | None:
        """The class with a threshold, where it is one."""
        named = [c for c, t in enumerate(self.thresholds) if t is not None]
        return named[0] if len(named) == 1 else None

    def probabilities(self, p: np.ndarray) -> np.ndarray:
        """(N, C) calibrated probabilities."""
        if self.temperature == 1.0 and not self.bias:
            return p
        z = np.log(np.maximum(p, TINY)) / self.temperature
        z = z + np.asarray(self.bias) if self.bias else z
        powered = np.exp(z - z.max(-1, keepdims=True, initial=-np.inf))
        return np.asarray(powered / powered.sum(-1, keepdims=True))

    def answers(self, p: np.ndarray) -> np.ndarray:
        """(N,) classes, from calibrated probabilities (N, C)."""
        score = -(p @ np.asarray(self.costs)) if self.costs else p * np.asarray(self.weights) if self.weights else p
        limits = self.limits
        if limits is None:
            return np.asarray(score.argmax(-1))
        ratio = np.maximum(p, TINY) / limits
        rest = np.where(np.isfinite(limits) & ~np.isfinite(limits).all(), -np.inf, score)
        return np.where(ratio.max(-1, initial=0.0) >= 1, ratio.argmax(-1), rest.argmax(-1))

    def scores(self, p: np.ndarray, y: np.ndarray, *, tempered: bool = True) -> Scores:
        """Count probabilities (N, C) of a model, calibrated, and the answers that are made of them; y: (N,) labels."""
        calibrated = self.probabilities(p)
        return Scores.of(calibrated, y, self.answers(calibrated), tempered=tempered)

    @property
    def limits(self) -> np.ndarray | None:
        """(C,) thresholds, infinite for classes without one; None if no class has one. One of ``TINY`` or less, such as
        the 0 of a promise that every case has to be found for, is reached by every probability, 0 among them."""
        if not any(t is not None for t in self.thresholds):
            return None
        return np.array([np.inf if t is None else t if t > TINY else TINY / 2 for t in self.thresholds])

    def with_promise(self, target: int, promise: Promise, n_classes: int) -> Decision:
        """Return the decision with the threshold that keeps a promise."""
        return replace(self.with_threshold(target, promise.threshold, n_classes), promise=promise)

    def with_sets(self, scores: Scores) -> Decision:
        """Return the decision with sets found on these counts, which must be under its own calibration."""
        return replace(self, sets=tuple(set_thresholds(scores.bins, coverage) for coverage in COVERAGES))

    def with_threshold(self, target: int, threshold: float, n_classes: int) -> Decision:
        now = self.thresholds or (None,) * n_classes
        return replace(self, thresholds=tuple(threshold if c == target else t for c, t in enumerate(now)))

    def to_json(self) -> dict[str, Any]:
        out = {name: value for name, value in asdict(self).items() if value is not None}
        return out if self.promise is None else {**out, "promise": self.promise.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Decision:
        given = dict(fields)
        if given.get("promise") is not None:
            given["promise"] = Promise.from_json(given["promise"])
        given["sets"] = tuple(tuple(float(v) for v in row) for row in given.get("sets", ()))
        for name in ("bias", "weights"):
            given[name] = tuple(float(w) for w in given.get(name, ()))
        given["costs"] = tuple(tuple(float(v) for v in row) for row in given.get("costs", ()))
        given["thresholds"] = tuple(None if t is None else float(t) for t in given.get("thresholds", ()))
        return cls(**given)

    def check(self, n_classes: int) -> None:
        """``ValueError`` unless it is a decision over so many classes: it may come from elsewhere."""
        rows = [self.bias, self.weights, self.thresholds, *self.costs, *self.sets]
        if any(row and len(row) != n_classes for row in [*rows, self.costs]):
            raise ValueError(f"it is not for {n_classes} classes")
        numbers = [self.temperature, *(v for row in rows for v in row if v is not None)]
        if not np.isfinite(numbers).all() or self.temperature <= 0:
            raise ValueError("it has non-finite numbers")


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
        return self.common.plain and all(decision.plain for decision in self.sites.values())


@dataclass(frozen=True)
class SiteGoal:
    """Plain numbers, which a message can carry, from which a site finds its own decision."""

    common: Decision
    goal: str
    """The setting ``decision.goal``."""
    shares: tuple[float, ...]
    """(C,) each class's share over all sites together."""
    curve: tuple[float, ...] = ()
    """What each of ``POWERS`` is worth on the rows of all sites together, see ``worth_of_powers``."""
    recall: float = 0.95
    confidence: float = 0.9

    def decide(self, p: np.ndarray, y: np.ndarray, counts: np.ndarray) -> Decision:
        """A site's own decision.

        Args:
            p: (N, C) the model's probabilities on the site's private split, as they are; y: (N,) the labels.
            counts: (C,) the site's training samples, of which there are more to know its class mix by.
        """
        if self.goal == "recall":  # a common probability finds the same share at every site, whatever its class mix
            return self._found(self.common.probabilities(p), y)
        shares = np.asarray(self.shares)
        mix = (counts + PRIOR_SAMPLES * shares) / (counts.sum() + PRIOR_SAMPLES)
        bias = np.log(mix / shares) + (np.asarray(self.common.bias) if self.common.bias else 0.0)
        own = replace(self.common, bias=tuple(float(b) for b in bias), weights=())
        if self.goal == "balanced_accuracy":
            return replace(own, weights=share_weights(mix, EQUAL))
        if self.goal != "macro_f1":
            return own
        q, n = own.probabilities(p), len(y)
        answers = (replace(own, weights=share_weights(mix, power)).answers(q) for power in POWERS)
        here = worth_of_powers([confusion_matrix(y, answered, len(mix)) for answered in answers])
        trust = n / (n + CURVE_SAMPLES)
        value = [trust * a + (1 - trust) * b if np.isfinite(a) else b for a, b in zip(here, self.curve, strict=True)]
        return replace(own, weights=share_weights(mix, POWERS[int(np.argmax(value))]))

    def _found(self, p: np.ndarray, y: np.ndarray) -> Decision:
        """The threshold that keeps the promise at this site, where its own samples suffice; else the common one."""
        target = self.common.target
        if target is None:  # for no site had a case
            return self.common
        scores = Scores.of(p, y, tempered=False)
        own = promise_recall(scores.bins[target], self.recall, self.confidence)
        decision = self.common.with_promise(target, own, p.shape[1]) if own.kept else replace(self.common, promise=None)
        return decision.with_sets(scores) if (scores.bins[:, 1].sum(-1) >= ENOUGH).all() else decision

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SiteGoal:
        shares, curve = (tuple(float(v) for v in fields[name]) for name in ("shares", "curve"))
        return cls(
            common=Decision.from_json(fields["common"]),
            goal=str(fields["goal"]),
            shares=shares,
            curve=curve,
            recall=float(fields["recall"]),
            confidence=float(fields["confidence"]),
        )


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


def bias_step(scores: Scores) -> np.ndarray:
    """(C,) what to add to the bias so that the model expects as many of each class as there are: a step of generalized
    iterative scaling (Darroch and Ratcliff, 1972), which ends at the least log loss."""
    there, expected = scores.bins[:, 1].sum(-1), scores.mass / ONE
    return np.asarray(np.log((there + 0.5) / (expected + 0.5)))


def class_shares(scores: Scores) -> np.ndarray:
    """(C,) each class's share of the samples; none is 0."""
    counts = np.maximum(scores.bins[:, 1].sum(-1), 0.5)
    return np.asarray(counts / counts.sum())


def share_weights(shares: Sequence[float] | np.ndarray, power: float) -> tuple[float, ...]:
    """(C,) one over the share of each class to a power (Menon et al., ICLR 2021, after training), with mean 1; none for
    power 0, which is the argmax."""
    if not power:
        return ()
    weights = np.asarray(shares, dtype=np.float64) ** -power
    return tuple(float(w) for w in weights / weights.mean())


def worth_of_powers(tables: Sequence[np.ndarray]) -> np.ndarray:
    """(len(POWERS),) macro F1 of the answers at each power, less ``NOISE`` standard errors of its gain over the first.

    tables: (C, C) counts at each of ``POWERS``, row = true class.
    """
    values = np.array([float(METRICS["macro_f1"](evidence_of(table))) for table in tables])
    return values - NOISE * np.array([gain_error(tables[0], table) for table in tables])


def gain_error(before: np.ndarray, after: np.ndarray) -> float:
    """The standard error of the gain in macro F1 between two sets of answers to the same rows.

    Rows whose answer has moved make the difference, and which they are follows from the two tables (C, C) where answers
    move in one direction, as they do with a power. Their worth is taken to first order at ``after``.
    """
    support, answered, hit = after.sum(1), after.sum(0), np.diag(after)
    size = np.maximum(support + answered, 1)
    worth = np.tile(-2 * hit / size**2, (len(after), 1))
    worth[np.diag_indices(len(after))] += 2 / size
    worth /= max(np.count_nonzero(support), 1)
    gone, come = np.maximum(before - after, 0).astype(float), np.maximum(after - before, 0).astype(float)
    rows = np.maximum(come.sum(1), 1)
    squares = ((come + gone) * worth**2).sum(1) - 2 * (come * worth).sum(1) * (gone * worth).sum(1) / rows
    return float(np.sqrt(np.maximum(squares.sum(), 0.0)))
