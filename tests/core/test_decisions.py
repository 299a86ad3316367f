"""Temperatures, weights and thresholds from counts, against what they promise on the samples themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedtail.core.decisions import Decision, best_temperature, f1_weights, recall_threshold
from fedtail.core.metrics import confusion_matrix, summarize
from fedtail.core.scores import Scores, calibration_error, log_loss
from tests.core.test_scores import draw


def sharpened(p: np.ndarray, temperature: float) -> np.ndarray:
    powered = p.astype(np.float64) ** (1 / temperature)
    return powered / powered.sum(1, keepdims=True)


@pytest.mark.parametrize("wrong", [0.4, 0.7, 1.0, 1.8, 3.0])
def test_the_temperature_undoes_overconfidence_and_its_opposite(wrong: float) -> None:
    rng = np.random.default_rng(99)
    p, _ = draw(20_000, 4, 2.0, 0)
    y = (p.cumsum(1) > rng.random((len(p), 1))).argmax(1)  # labels drawn from the probabilities: perfectly calibrated
    given = sharpened(p, wrong)
    scores = Scores.of(given, y)
    found = best_temperature(scores)
    assert found == pytest.approx(1 / wrong, rel=0.06)
    after = Scores.of(Decision(temperature=found).probabilities(given), y)
    assert log_loss(after) <= log_loss(scores) + 1e-9
    assert calibration_error(after.cells) < max(0.5 * calibration_error(scores.cells), 0.012)


def test_weights_for_macro_f1_help_where_a_class_is_never_the_likeliest() -> None:
    p, y = draw(8000, 4, 1.5, 3, rare=0.2)
    scores = Scores.of(p, y)
    decision = Decision(weights=f1_weights(scores))
    before = summarize(scores.confusion)["macro_f1"]
    after = summarize(confusion_matrix(y, decision.answers(p), 4))["macro_f1"]
    assert after > before + 0.03


@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.95])
def test_a_wanted_recall_is_met_where_it_was_set_and_about_met_elsewhere(wanted: float) -> None:
    p, y = draw(6000, 4, 1.5, 4, rare=0.3)
    q, z = draw(6000, 4, 1.5, 5, rare=0.3)
    decision = Decision(target=3, threshold=recall_threshold(Scores.of(p, y), 3, wanted))
    assert (decision.answers(p)[y == 3] == 3).mean() >= wanted
    n = int((z == 3).sum())
    spread = 4 * np.sqrt(wanted * (1 - wanted) / n)
    assert (decision.answers(q)[z == 3] == 3).mean() == pytest.approx(wanted, abs=spread + 0.01)


def test_costs_choose_the_answer_with_the_least_expected_cost() -> None:
    p = np.array([[0.9, 0.1], [0.7, 0.3]])
    dear = Decision(costs=((0.0, 1.0), (5.0, 0.0)))  # missing class 1 costs five times as much as a false alarm
    assert dear.answers(p).tolist() == [0, 1]
    assert Decision().answers(p).tolist() == [0, 0]


def test_a_decision_survives_json_and_says_when_it_is_none() -> None:
    decision = Decision(temperature=1.7, weights=(1.0, 2.0), target=1, threshold=0.2)
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert Decision.from_json({}).plain and not decision.plain
