"""Metrics from binned counts against scikit-learn's exact values on the scores themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score
from sklearn.metrics import log_loss as exact_log_loss

from fedtail.core.scores import (
    Scores,
    average_precision,
    balanced_loss,
    brier_score,
    calibration_error,
    curve,
    log_loss,
    reliability,
    roc_auc,
)


def draw(n: int, classes: int, skill: float, seed: int, rare: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a model with some skill, on labels with a long tail."""
    rng = np.random.default_rng(seed)
    share = rare ** np.arange(classes)
    y = rng.choice(classes, size=n, p=share / share.sum())
    y[:classes] = np.arange(classes)
    logits = rng.normal(0, 1, (n, classes)) + np.log(share) + skill * np.eye(classes)[y]
    p = np.exp(logits - logits.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)).astype(np.float32), y


@given(st.integers(200, 3000), st.integers(2, 8), st.floats(0.0, 9.0), st.integers(0, 10_000), st.floats(0.2, 1.0))
def test_areas_are_within_half_a_percent_of_the_exact_ones(
    n: int, classes: int, skill: float, seed: int, rare: float
) -> None:
    p, y = draw(n, classes, skill, seed, rare)
    scores = Scores.of(p, y)
    for c in np.flatnonzero(np.bincount(y) >= 10):  # of fewer, one pair in one bin is more than that
        assert average_precision(scores.bins[c]) == pytest.approx(average_precision_score(y == c, p[:, c]), abs=0.005)
        assert roc_auc(scores.bins[c]) == pytest.approx(roc_auc_score(y == c, p[:, c]), abs=0.005)


@given(st.integers(1, 400), st.integers(2, 5), st.integers(0, 1000))
def test_counts_of_parts_add_up_to_those_of_the_whole(n: int, classes: int, seed: int) -> None:
    p, y = draw(n + classes, classes, 1.0, seed)
    cut = seed % len(y)
    whole, sum_ = Scores.of(p, y), Scores.of(p[:cut], y[:cut]) + Scores.of(p[cut:], y[cut:])
    for name in ("confusion", "bins", "cells"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(sum_, name))
    assert np.abs(whole.sums - sum_.sums).max() <= 1  # two roundings instead of one
    assert whole.n == n + classes and whole.confusion.sum() == whole.n


def test_losses_and_calibration_are_the_textbooks() -> None:
    p, y = draw(4000, 5, 2.0, 0)
    scores = Scores.of(p, y)
    assert log_loss(scores) == pytest.approx(exact_log_loss(y, p.astype(np.float64)), rel=1e-4)
    each = [exact_log_loss(y[y == c], p[y == c].astype(np.float64), labels=range(5)) for c in range(5)]
    assert balanced_loss(scores) == pytest.approx(np.mean(each), rel=1e-4)
    assert balanced_loss(Scores.of(p[y != 4], y[y != 4])) == pytest.approx(np.mean(each[:4]), rel=1e-4)
    assert brier_score(scores) == pytest.approx(((p - np.eye(5)[y]) ** 2).sum(1).mean(), rel=1e-4)
    top, hit = p.max(1), p.argmax(1) == y
    cell = np.minimum((top.astype(np.float64) * 15).astype(int), 14)
    exact = sum(abs(hit[cell == b].sum() - top[cell == b].sum()) for b in range(15)) / len(y)
    assert calibration_error(scores.cells) == pytest.approx(exact, abs=1e-4)
    confidence, accuracy, n = reliability(scores.cells)
    assert n.sum() == len(y) and ((accuracy >= 0) & (accuracy <= 1)).all() and (np.diff(confidence) > 0).all()


def test_a_wanted_recall_is_met_with_the_precision_that_it_costs() -> None:
    p, y = draw(5000, 4, 2.5, 1)
    bins = Scores.of(p, y).bins[3]
    precision, threshold = next((p, t) for t, p, found in zip(*curve(bins), strict=True) if found >= 0.9)
    called = p[:, 3] >= threshold
    assert (called & (y == 3)).sum() / (y == 3).sum() >= 0.9
    assert precision == pytest.approx((called & (y == 3)).sum() / called.sum(), abs=1e-9)
    exact, recall, _ = precision_recall_curve(y == 3, p[:, 3])
    assert precision == pytest.approx(exact[recall >= 0.9].max(), abs=0.02)


def test_samples_that_the_model_cannot_tell_apart_count_half() -> None:
    p, y = np.tile([0.3, 0.7], (10, 1)), np.array([0, 1] * 5)
    assert roc_auc(Scores.of(p, y).bins[1]) == 0.5


def test_a_class_without_samples_has_no_area() -> None:
    p, y = draw(100, 3, 1.0, 0)
    scores = Scores.of(p[y != 2], y[y != 2])
    assert np.isnan(average_precision(scores.bins[2])) and np.isnan(roc_auc(scores.bins[2]))
    assert len(curve(scores.bins[0])[0]) > 1
    nobody = Scores.of(p[:0], y[:0])
    assert nobody.n == 0 and np.isnan(brier_score(nobody)) and np.isnan(calibration_error(nobody.cells))
