"""Temperatures, weights and thresholds from counts, against what they promise on the samples themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedtail.core.decisions import (
    EQUAL,
    POWERS,
    Decision,
    SiteGoal,
    best_temperature,
    bias_step,
    class_shares,
    gain_error,
    share_weights,
    worth_of_powers,
)
from fedtail.core.evidence import confusion_matrix
from fedtail.core.metrics import summarize
from fedtail.core.promise import promise_recall
from fedtail.core.scores import Scores, calibration_error, log_loss
from fedtail.runs.split_scores import tradeoff_of
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
    shares = class_shares(scores)
    curve = [macro_f1(y, Decision(weights=share_weights(shares, power)).answers(p)) for power in POWERS]
    assert curve[0] == summarize(scores.confusion)["macro_f1"] and max(curve) > curve[0] + 0.03


def test_a_model_that_predicts_too_many_of_a_rare_class_is_moved_away_from_it() -> None:
    p, y = draw(8000, 4, 1.5, 3, rare=0.2)
    shares = class_shares(Scores.of(p, y))
    resampled = p / shares
    curve = [macro_f1(y, Decision(weights=share_weights(shares, power)).answers(resampled)) for power in POWERS]
    assert POWERS[int(np.argmax(curve))] < 0 and max(curve) > curve[0] + 0.02


def test_where_all_classes_count_alike_the_whole_share_is_divided_by_at_every_site_too() -> None:
    rng = np.random.default_rng(5)
    p, _ = draw(40_000, 4, 1.5, 3, rare=0.2)
    y = (p.cumsum(1) > rng.random((len(p), 1))).argmax(1)  # calibrated, so that the rule is Bayes's
    shares = class_shares(Scores.of(p, y))

    def balanced(rule: Decision, rows: np.ndarray) -> float:
        given = rule.answers(rule.probabilities(p[rows]))
        return float(summarize(confusion_matrix(y[rows], given, 4))["balanced_accuracy"])

    every = np.arange(len(y))
    curve = [balanced(Decision(weights=share_weights(shares, power)), every) for power in (*POWERS, 1.4)]
    assert int(np.argmax(curve)) == POWERS.index(EQUAL) and max(curve) > curve[0] + 0.1
    common = Decision(weights=share_weights(shares, EQUAL))
    here = np.flatnonzero(rng.random(len(y)) < np.array([0.05, 0.2, 0.5, 1.0])[y])  # rare ones are common here
    own = site_goal(p, y, "balanced_accuracy", common=common).decide(
        p[here], y[here], np.bincount(y[here], minlength=4)
    )
    assert own.bias[3] > 0 > own.bias[0], "probabilities are those of the site's own class mix"
    assert balanced(own, here) == pytest.approx(balanced(common, here), abs=1e-9)


def test_the_error_of_a_gain_is_that_of_resampled_rows() -> None:
    rng = np.random.default_rng(8)
    p, y = draw(800, 4, 1.5, 3, rare=0.3)
    moved = Decision(weights=share_weights(class_shares(Scores.of(p, y)), 0.4)).answers(p)
    answers = p.argmax(1), moved
    drawn = rng.integers(len(y), size=(400, len(y)))
    gains = [macro_f1(y[rows], answers[1][rows]) - macro_f1(y[rows], answers[0][rows]) for rows in drawn]
    error = gain_error(*(confusion_matrix(y, given, 4) for given in answers))
    assert error == pytest.approx(np.std(gains), rel=0.3)
    assert gain_error(*[confusion_matrix(y, moved, 4)] * 2) == 0


def two_classes(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which 8 % are positive, and the probabilities that they truly have."""
    y = (rng.random(n) < 0.08).astype(int)
    odds = 2.6 * (rng.normal(size=n) + 2.6 * y) - 2.6**2 / 2 + np.log(0.08 / 0.92)
    positive = 1 / (1 + np.exp(-odds))
    return np.stack([1 - positive, positive], 1), y


def test_on_a_small_table_answers_stay_where_they_are_unless_the_gain_is_more_than_luck() -> None:
    rng = np.random.default_rng(7)
    p, y = two_classes(40_000, rng)
    rules = [Decision(weights=share_weights((0.92, 0.08), power)) for power in POWERS]
    worth = np.array([summarize(confusion_matrix(y, rule.answers(p), 2))["macro_f1"] for rule in rules]) - 1
    worth -= worth[0]  # on rows to come, against the likeliest class
    lucky, safe = [], []
    for _ in range(300):
        few, truth = two_classes(60, rng)
        if truth.sum() > 1:
            tables = [confusion_matrix(truth, rule.answers(few), 2) for rule in rules]
            lucky.append(worth[int(np.argmax([summarize(table)["macro_f1"] for table in tables]))])
            safe.append(worth[int(np.argmax(worth_of_powers(tables)))])
    lost = [np.mean(np.array(gains) < -0.02) for gains in (lucky, safe)]
    assert lost[0] > 0.15 and lost[1] < 0.12 and np.mean(safe) > np.mean(lucky) + 0.003, "five positives tell little"
    few, truth = two_classes(20_000, rng)
    tables = [confusion_matrix(truth, rule.answers(few), 2) for rule in rules]
    assert worth[int(np.argmax(worth_of_powers(tables)))] > 0, "1,600 tell"


def macro_f1(y: np.ndarray, answers: np.ndarray) -> float:
    return float(summarize(confusion_matrix(y, answers, 4))["macro_f1"])


def test_a_bias_per_class_undoes_what_training_on_another_class_mix_did() -> None:
    rng = np.random.default_rng(1)
    p, _ = draw(20_000, 4, 2.0, 0)
    y = (p.cumsum(1) > rng.random((len(p), 1))).argmax(1)
    off = np.array([0.0, 1.0, 2.0, 3.0])  # as if rare classes had been repeated
    given, decision = Decision(bias=tuple(off)).probabilities(p), Decision()
    for _ in range(12):
        bias = np.asarray(decision.bias or 0.0) + bias_step(Scores.of(decision.probabilities(given), y))
        decision = Decision(bias=tuple(bias))
    found = np.asarray(decision.bias)
    np.testing.assert_allclose(found - found[0], -(off - off[0]), atol=0.2)
    after = Scores.of(decision.probabilities(given), y)
    assert calibration_error(after.cells) < 0.5 * calibration_error(Scores.of(given, y).cells)


def site_goal(p: np.ndarray, y: np.ndarray, goal: str = "macro_f1", **more: object) -> SiteGoal:
    shares = class_shares(Scores.of(p, y))
    curve = tuple(macro_f1(y, Decision(weights=share_weights(shares, power)).answers(p)) for power in POWERS)
    return SiteGoal(common=more.pop("common", Decision()), goal=goal, shares=tuple(shares), curve=curve, **more)


def test_a_site_corrects_for_its_own_class_mix_and_answers_better_there() -> None:
    p, y = draw(20_000, 4, 1.5, 3, rare=0.3)
    goal, rng = site_goal(p, y), np.random.default_rng(0)
    keep = rng.random(len(y)) < np.array([0.05, 0.2, 0.5, 1.0])[y]  # rare ones are common here
    here, later = np.flatnonzero(keep)[:400], np.flatnonzero(keep)[400:]
    own = goal.decide(p[here], y[here], np.bincount(y[here], minlength=4))
    before, after = (macro_f1(y[later], rule.answers(rule.probabilities(p[later]))) for rule in (Decision(), own))
    assert after > before + 0.05
    assert own.bias[3] > 0 > own.bias[0]
    told = Scores.of(own.probabilities(p[later]), y[later])
    assert calibration_error(told.cells) < 0.5 * calibration_error(Scores.of(p[later], y[later]).cells)
    assert SiteGoal.from_json(json.loads(json.dumps(goal.to_json()))) == goal


def test_a_site_with_few_samples_keeps_to_the_common_finding() -> None:
    p, y = draw(20_000, 4, 1.5, 3, rare=0.3)
    scores = Scores.of(p, y)
    common = Decision().with_promise(3, promise_recall(scores.bins[3], 0.9, 0.9), 4).with_sets(scores)
    goal = site_goal(p, y, "recall", common=common, recall=0.9)
    nothing = goal.decide(p[:0], y[:0], np.zeros(4, dtype=int))
    assert nothing == replace(common, promise=None)  # the common threshold, and no promise of its own
    assert site_goal(p, y).decide(p[:0], y[:0], np.zeros(4, dtype=int)).bias == pytest.approx((0.0,) * 4)
    rows = np.flatnonzero(y == 3)
    few = goal.decide(p[rows[:21]], y[rows[:21]], np.bincount(y[rows[:21]], minlength=4))
    assert few == nothing  # 22 cases are needed for 90 % at 90 %


def test_a_site_with_samples_enough_keeps_a_promise_and_sets_of_its_own() -> None:
    p, y = draw(20_000, 4, 1.5, 3, rare=0.3)
    scores = Scores.of(p, y)
    common = Decision().with_promise(3, promise_recall(scores.bins[3], 0.9, 0.9), 4)
    goal = site_goal(p, y, "recall", common=common, recall=0.9)
    easy = p[:, 3] > 0.2  # a site whose cases are easier to tell
    own = goal.decide(p[easy], y[easy], np.bincount(y[easy], minlength=4))
    assert own.promise is not None and own.promise.kept and own.promise.recall == 0.9
    assert own.thresholds[3] > goal.common.thresholds[3]
    assert (own.answers(p[easy])[y[easy] == 3] == 3).mean() >= 0.9
    assert not own.sets or len(own.sets[0]) == 4


def test_thresholds_of_several_classes_call_the_one_furthest_above_its_own() -> None:
    rule = Decision(thresholds=(None, 0.2, 0.1))
    p = np.array([[0.9, 0.05, 0.05], [0.5, 0.3, 0.2], [0.5, 0.4, 0.1], [0.79, 0.19, 0.02]])
    assert rule.answers(p).tolist() == [0, 2, 1, 0]
    assert Decision(thresholds=(0.95, 0.5, 0.5)).answers(p).tolist() == [0, 0, 0, 0]  # none is reached: the likeliest


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_promise_that_every_case_must_be_found_for_finds_those_of_probability_0_too(kind: type) -> None:
    rng = np.random.default_rng(0)
    own = np.where(rng.random(45) < 0.3, 0.0, rng.random(45))  # as of a forest whose leaves are pure
    p = np.stack([1 - own, own], 1).astype(kind)
    scores = Scores.of(p, np.ones(45, dtype=np.int64))
    promise = promise_recall(scores.bins[1], 0.95, 0.9)
    assert promise.kept and promise.threshold == 0 and promise.found == 45
    for decision in (Decision(), Decision(bias=(0.0, -0.5)), Decision(temperature=0.7)):
        rule = decision.with_promise(1, promise, 2)
        assert (rule.answers(rule.probabilities(p)) == 1).all()


@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.95])
def test_a_wanted_recall_is_met_where_it_was_set_and_about_met_elsewhere(wanted: float) -> None:
    p, y = draw(6000, 4, 1.5, 4, rare=0.3)
    q, z = draw(6000, 4, 1.5, 5, rare=0.3)
    decision = Decision().with_promise(3, promise_recall(Scores.of(p, y).bins[3], wanted, 0.5), 4)
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
    promise = promise_recall(np.ones((2, 4096), dtype=int), 0.9, 0.9)
    decision = Decision(temperature=1.7, bias=(0.0, 1.0), weights=(1.0, 2.0), sets=((0.1, 0.2),))
    decision = decision.with_promise(1, promise, 2)
    decision.check(2)
    for broken in (Decision(bias=(1.0,)), Decision(temperature=float("nan")), Decision(costs=((0.0, 1.0),))):
        with pytest.raises(ValueError, match=r"is not for 2 classes|non-finite"):
            broken.check(2)
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert Decision.from_json({}).plain and not decision.plain


def test_the_cost_of_a_threshold_counts_misses_at_theirs_and_alarms_at_theirs() -> None:
    p, y = draw(400, 3, 1.0, 8, rare=0.3)
    scores = Scores.of(p, y)
    free = tradeoff_of(scores, Decision().with_threshold(2, 0.5, 3), "abc")
    costs = ((0.0, 0.0, 3.0), (0.0, 0.0, 5.0), (20.0, 40.0, 0.0))  # an alarm costs 4 on average, a miss 30
    found = tradeoff_of(scores, Decision(costs=costs).with_threshold(2, 0.5, 3), "abc")["cost"]
    by_hand = (30 * np.array(free["missed"]) + 4 * np.array(free["false_alarms"])) / scores.n
    np.testing.assert_allclose(found, by_hand, atol=1e-4)
    assert max(free["missed"]) > 0 and max(free["false_alarms"]) > 0
