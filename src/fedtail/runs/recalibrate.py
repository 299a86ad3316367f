"""Refit how a trained model's probabilities become answers, without training: on labelled rows, or to a new class mix.

The model's weights stay as they are; the decision it had is kept beside the new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.decisions import POWERS, Decision, best_temperature, class_shares, share_weights
from fedtail.core.metrics import summarize
from fedtail.core.promise import promise_recall
from fedtail.errors import FedtailError, writing
from fedtail.runs.judged import Judged
from fedtail.runs.monitor import Watch
from fedtail.runs.saved import SavedModel

BEFORE = "decision-before.json"


@dataclass(frozen=True)
class Recalibrated:
    """A new decision, and what both are worth on the rows it was found on."""

    decision: Decision
    before: dict[str, float]
    after: dict[str, float]
    mix: dict[str, float]
    """Class shares of the new rows."""


def recalibrate(judged: Judged, watch: Watch | None = None) -> Recalibrated:
    """Refit a model's decision to new rows.

    With labels: the temperature, then the threshold that keeps the decision's promise, or its weights for macro F1,
    and the sets. Without labels: the class mix, by which probabilities are corrected; ``watch`` knows from reference
    rows which mix they stand for.
    """
    old = judged.decision
    if judged.y is None or not (judged.y >= 0).any():
        if watch is None:
            raise FedtailError(
                "these rows have no labels; name the label column, or begin with labelled reference rows "
                "(fedtail monitor --reference), by which a new class mix can be found without"
            )
        mix = watch.mix(judged)
        moved = np.log(np.maximum(mix, 1e-6) / np.asarray(watch.shares)) + np.log(watch.weights)
        bias = moved + (np.asarray(old.bias) if old.bias else 0.0)
        new = replace(old, bias=tuple(bias.tolist()), weights=(), promise=None, sets=())
        return Recalibrated(new, {}, {}, _named(judged, mix))
    rows = judged.labelled
    assert rows.y is not None
    scores = rows.scores
    factor = best_temperature(scores)
    new = replace(
        old, temperature=old.temperature * factor, bias=tuple(b / factor for b in old.bias), promise=None, sets=()
    )
    scores = replace(rows, decision=new).scores
    target = old.target
    if target is not None and old.promise is not None:
        promise = promise_recall(scores.bins[target], old.promise.wanted, old.promise.confidence)
        new = new.with_promise(target, promise, len(rows.classes))
    elif old.weights:
        tried = [replace(new, weights=share_weights(class_shares(scores), power)) for power in POWERS]
        new = max(tried, key=lambda one: summarize(replace(rows, decision=one).scores.confusion)["macro_f1"])
    new = new.with_sets(scores)
    worth = (_worth(replace(rows, decision=decision)) for decision in (old, new))
    return Recalibrated(new, next(worth), next(worth), _named(rows, class_shares(scores)))


def keep(model: SavedModel, folder: Path, found: Recalibrated) -> Path:
    """Write the new decision into the model's folder, and the one it had beside it."""
    path = folder / "model.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    partial = folder / ".model.json.partial"
    with writing(path):
        (folder / BEFORE).write_text(json.dumps(model.decision.to_json(), indent=1), encoding="utf-8")
        partial.write_text(json.dumps({**about, "decision": found.decision.to_json()}, indent=1), encoding="utf-8")
        partial.replace(path)
    return folder / BEFORE


def _worth(judged: Judged) -> dict[str, float]:
    scores = judged.scores
    told: dict[str, Any] = summarize(scores.confusion, scores=scores)
    return {name: float(told[name]) for name in ("accuracy", "macro_f1", "log_loss", "calibration_error")}


def _named(judged: Judged, mix: np.ndarray) -> dict[str, float]:
    return dict(zip(judged.classes, mix.tolist(), strict=True))
