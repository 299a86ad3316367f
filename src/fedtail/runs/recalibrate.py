"""Refit how a trained model's probabilities become answers, without training: on labelled rows, or to a new class mix.

The model's weights stay as they are; the decision it had is kept beside the new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.decisions import ENOUGH, EQUAL, Decision, class_shares, share_weights
from fedtail.core.metrics import summarize
from fedtail.core.promise import promise_recall
from fedtail.core.scores import BINS, Scores, bin_edges
from fedtail.core.shift import PRIOR
from fedtail.errors import FedtailError, writing
from fedtail.files import write_atomically
from fedtail.runs.decide import best_power, calibrated
from fedtail.runs.judged import Judged
from fedtail.runs.monitor import Seen, Watch, count

BEFORE = "decision-before.json"


@dataclass(frozen=True)
class Recalibrated:
    """A new decision, and what both are worth on the rows it was found on."""

    decision: Decision
    before: dict[str, float]
    after: dict[str, float]
    mix: dict[str, float]
    """Class shares of the new rows."""


def recalibrate(judged: Judged, watch: Watch | None = None, goal: str = "") -> Recalibrated:
    """Refit a model's decision to new rows: with labels all of it, without them the class mix.

    watch: knows from reference rows which class mix the model's probabilities stand for. goal: the ``decision.goal``
    that its weights were chosen for.
    """
    if judged.y is not None and (judged.y >= 0).any():
        rows = judged.labelled
        return refit(judged.decision, judged.classes, lambda decision: replace(rows, decision=decision).scores, goal)
    if watch is None:
        raise FedtailError(
            "these rows have no labels; name the label column, or begin with labelled reference rows "
            "(fedtail monitor --reference), by which a new class mix can be found without"
        )
    return move_mix(judged.decision, watch, count(judged, watch.reference.inputs))


def refit(old: Decision, classes: Sequence[str], ask: Callable[[Decision], Scores], goal: str = "") -> Recalibrated:
    """Refit the calibration, then the threshold that keeps the promise, or the weights for the goal, and the sets.

    The calibration is a temperature, and a bias of each class where all have ``ENOUGH`` cases to follow their mix by.
    ask: returns the counts of all labelled rows under a decision, such as sums over sites.
    """
    before = ask(old)
    how = "vector" if before.confusion.sum(1).min() >= ENOUGH else "temperature"
    new, scores = calibrated(ask, how, before, replace(old, promise=None, sets=()))
    if old.target is not None and old.promise is not None:
        promise = promise_recall(scores.bins[old.target], old.promise.wanted, old.promise.confidence)
        if not promise.positives:
            name = classes[old.target]
            raise FedtailError(f"0 rows are {name!r}, whose recall is promised; give {promise.needed} cases or more")
        new = new.with_promise(old.target, promise, len(classes))
    elif old.target is not None:  # without a promise: the one that finds as many of the cases as before
        row, own = before.confusion[old.target], np.cumsum(scores.bins[old.target, 1])
        place = min(int(np.searchsorted(own, row.sum() - row[old.target] + 1)), BINS - 1)
        if row.sum():
            new = new.with_threshold(old.target, float(bin_edges()[place]), len(classes))
    elif goal == "balanced_accuracy":
        new = replace(new, weights=share_weights(class_shares(scores), EQUAL))
    elif old.weights or goal == "macro_f1":
        new, _ = best_power(ask, new, scores)
    new = new.with_sets(scores)
    mix = dict(zip(classes, class_shares(scores).tolist(), strict=True))
    return Recalibrated(new, _worth(before), _worth(ask(new)), mix)


def move_mix(old: Decision, watch: Watch, seen: Seen) -> Recalibrated:
    """Correct probabilities for the class mix of new rows, which have no labels. Of less than ``PRIOR`` reference cases
    a density is belief more than counts; of fewer rows than hold as many, that none of them is rare may be luck."""
    cases = watch.reference.truth.sum((1, 2))
    few, needed = int(cases.argmin()), -int(-PRIOR * cases.sum() // max(cases.min(), 1))
    if cases[few] < PRIOR or seen.n < needed:
        who = f"{seen.n:,} rows without labels, and {cases[few]:,} reference cases of {watch.classes[few]!r}"
        takes = f"{PRIOR:g} reference cases of each class (fedtail monitor --reference) and here {needed:,} rows"
        raise FedtailError(f"{who}, cannot tell a class mix; it takes {takes}; or name the label column")
    mix = watch.mix(seen)
    moved = np.log(np.maximum(mix, 1e-6) / watch.shares) + np.log(watch.weights)
    bias = moved + (np.asarray(old.bias) if old.bias else 0.0)
    at = tuple(None if t is None else moved_threshold(t, c, moved, watch.shares) for c, t in enumerate(old.thresholds))
    new = replace(old, bias=tuple(bias.tolist()), weights=(), thresholds=at, promise=None, sets=())
    return Recalibrated(new, {}, {}, dict(zip(watch.classes, mix.tolist(), strict=True)))


def moved_threshold(threshold: float, c: int, moved: np.ndarray, shares: np.ndarray) -> float:
    """Return the threshold of class ``c`` that finds the same rows after ``moved`` (C,) is added to log-probabilities.

    A class is found as often in any class mix, so its threshold moves with the odds. Of more than two classes, the
    others are taken to be met by their ``shares``.
    """
    factor = np.exp(moved)
    others = np.delete(shares * factor, c).sum() / np.delete(shares, c).sum()
    odds = threshold * factor[c] / others
    return float(odds / (odds + 1 - threshold))


def keep(folder: Path, new: Recalibrated) -> Path:
    """Write the new decision into the model's folder, and the one it had beside it."""
    path = folder / "model.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    with writing(path):
        write_atomically(folder / BEFORE, json.dumps(about.get("decision", {}), indent=1))
        write_atomically(path, json.dumps({**about, "decision": new.decision.to_json()}, indent=1))
    return folder / BEFORE


def _worth(scores: Scores) -> dict[str, float]:
    metrics: dict[str, Any] = summarize(scores.confusion, scores=scores)
    shown = ("accuracy", "balanced_accuracy", "macro_f1", "log_loss", "calibration_error")
    return {name: float(metrics[name]) for name in shown}
