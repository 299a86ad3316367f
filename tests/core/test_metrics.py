import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedtail.core.evidence import class_counts, confusion_matrix, shot_groups
from fedtail.core.metrics import majority_floor, score, summarize
from fedtail.core.movement import alignment, path_variation
from fedtail.data.sets import long_tail_counts
from fedtail.errors import FedtailError

pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(pairs)
def test_metrics_equal_scikit_learns_over_the_classes_that_occur(data: list[tuple[int, int]]) -> None:
    y, z = map(np.array, zip(*data, strict=True))
    ours = summarize(confusion_matrix(y, z, 4))
    present = np.unique(y)
    assert ours["accuracy"] == pytest.approx(sk.accuracy_score(y, z))
    assert ours["macro_f1"] == pytest.approx(sk.f1_score(y, z, labels=present, average="macro", zero_division=0))
    assert ours["weighted_f1"] == pytest.approx(sk.f1_score(y, z, labels=range(4), average="weighted", zero_division=0))
    assert ours["balanced_accuracy"] == pytest.approx(
        np.mean(sk.recall_score(y, z, labels=present, average=None, zero_division=0))
    )
    assert ours["micro_f1"] == ours["accuracy"]


@settings(max_examples=50, deadline=None)
@given(pairs)
def test_scores_from_class_counts_equal_those_from_the_confusion_matrix(data: list[tuple[int, int]]) -> None:
    y, z = map(np.array, zip(*data, strict=True))
    m = confusion_matrix(y, z, 4)
    whole = summarize(m)
    for metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        assert float(score(class_counts(m), metric)) == pytest.approx(whole[metric])


def test_counts_pooled_over_clients_are_exact() -> None:
    a, b = confusion_matrix([0, 1, 1], [0, 0, 1], 2), confusion_matrix([1, 0], [1, 1], 2)
    pooled = score(class_counts(a) + class_counts(b), "macro_f1")
    assert float(pooled) == pytest.approx(summarize(a + b)["macro_f1"])


def test_unknown_metric_names_the_allowed_ones() -> None:
    with pytest.raises(FedtailError, match="macro_f1"):
        score(np.zeros((3, 2)), "f1")


def test_shot_groups_of_the_reference_protocol() -> None:
    sizes = {k: int(v.sum()) for k, v in shot_groups(long_tail_counts(500, 100, 100)).items()}
    assert sizes == {"many": 35, "medium": 34, "few": 31}
    sizes = {k: int(v.sum()) for k, v in shot_groups(long_tail_counts(500, 100, 20)).items()}
    assert sizes == {"many": 54, "medium": 46, "few": 0}


def test_an_empty_group_is_nan_not_zero() -> None:
    out = summarize(np.eye(2, dtype=int), [500, 300])
    assert math.isnan(out["few"]) and out["many"] == 1.0


@pytest.mark.parametrize(("ratio", "floor"), [(3.17, 0.657), (10, 0.866), (20, 0.929)])
def test_majority_only_floor_of_weighted_f1(ratio: float, floor: float) -> None:
    n = 100_000
    counts = [round(n * ratio / (1 + ratio)), round(n / (1 + ratio))]
    assert majority_floor(counts)["weighted_f1"] == pytest.approx(floor, abs=0.002)


def test_alignment_of_identical_and_of_orthogonal_updates() -> None:
    assert alignment(np.ones((4, 4)), np.full(4, 0.25)) == pytest.approx(1.0)
    assert alignment(9 * np.eye(5), np.full(5, 0.2)) == pytest.approx(1 / math.sqrt(5))


def test_path_variation_starts_at_zero_and_weighs_clients() -> None:
    rates = np.array([[0.4, 0.8], [0.6, 0.8], [0.6, 0.4]])
    np.testing.assert_allclose(path_variation(rates, [0.25, 0.75]), [0.0, 0.05, 0.35])


def test_defect_score_is_the_mean_of_defect_recall_and_precision_of_the_passed() -> None:
    """10 good (8 passed), 4 defects of two kinds: 3 called a defect (one of the wrong kind), 1 passed."""
    m = np.array([[8, 1, 1], [1, 1, 1], [0, 0, 1]])
    parts = summarize(m, background=0)
    assert parts["defect_recall"] == 3 / 4 and parts["background_precision"] == 8 / 9
    assert parts["false_alarm_rate"] == pytest.approx(0.2)
    assert parts["defect_score"] == pytest.approx((3 / 4 + 8 / 9) / 2)


def test_defect_score_of_passing_everything_or_nothing_is_at_most_a_half() -> None:
    passing = summarize([[98, 0], [2, 0]], background=0)
    assert passing["defect_recall"] == 0 and passing["defect_score"] == pytest.approx(0.49)
    nothing = summarize([[0, 98], [0, 2]], background=0)
    assert nothing["defect_score"] == 0.5 and np.isnan(nothing["background_precision"])


def test_a_declared_background_adds_the_defect_score_to_summary_and_floor() -> None:
    m = np.array([[8, 1, 1], [1, 1, 1], [0, 0, 1]])
    assert "defect_score" not in summarize(m)
    assert summarize(m, background=0)["defect_score"] == pytest.approx((3 / 4 + 8 / 9) / 2)
    assert majority_floor([98, 2], 0, background=0)["defect_recall"] == 0


@settings(max_examples=50, deadline=None)
@given(pairs, st.integers(0, 3))
def test_a_search_by_the_defect_score_needs_counts_per_class_only(data: list[tuple[int, int]], background: int) -> None:
    y, z = map(np.array, zip(*data, strict=True))
    m = confusion_matrix(y, z, 4)
    twice = np.stack([class_counts(m), class_counts(m.T)])
    scores = score(twice, "defect_score", background)
    assert scores.tolist() == [summarize(v, background=background)["defect_score"] for v in (m, m.T)]
    with pytest.raises(FedtailError, match="nothing found"):
        score(twice, "defect_score")


def test_head_and_tail_are_the_recalls_of_the_most_and_least_frequent_third() -> None:
    confusion = np.diag([9, 8, 7, 3, 2, 1]) + np.diag([1, 2, 3, 7, 8], 1)
    confusion[5, 0] = 9  # recalls .9 .8 .7 .3 .2 .1
    found = summarize(confusion, train_counts=[400, 500, 50, 10, 5, 100])
    assert found["head"] == pytest.approx((0.9 + 0.8) / 2) and found["tail"] == pytest.approx((0.3 + 0.2) / 2)
