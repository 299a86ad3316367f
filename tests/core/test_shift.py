"""Tests of a model's life: valid at any look, and with power where something changed."""

import numpy as np
import pytest
from scipy.stats import binom, fisher_exact

from fedtail.core.shift import class_mix, drift_p, evidence_of_loss, mix_step, prior_weights, spent


def test_all_looks_together_spend_at_most_alpha():
    total = sum(spent(0.05, look) for look in range(1, 100_000))
    assert 0.0499 < total < 0.05


def test_two_bins_are_fishers_exact_test():
    a, b = np.array([40, 10]), np.array([12, 12])
    one_sided = fisher_exact([a, b], alternative="greater").pvalue
    assert drift_p(a, b) == pytest.approx(2 * one_sided)


def test_without_a_change_p_is_small_no_more_often_than_it_says():
    rng = np.random.default_rng(0)
    shares = np.array([0.02, 0.08, 0.2, 0.3, 0.25, 0.15])
    for ordered in (True, False):
        p = [drift_p(rng.multinomial(400, shares), rng.multinomial(90, shares), ordered=ordered) for _ in range(1000)]
        assert np.mean(np.array(p) <= 0.05) <= 0.05


def test_a_shift_of_the_middle_is_seen_in_order_and_a_new_level_among_the_unordered():
    assert drift_p(np.array([500, 300, 200]), np.array([20, 30, 50])) < 1e-6
    assert drift_p(np.array([500, 500, 0]), np.array([45, 45, 10]), ordered=False) < 1e-6
    assert drift_p(np.array([5, 5]), np.zeros(2)) == 1.0 and drift_p(np.array([5, 0]), np.array([9, 0])) == 1.0


def test_the_class_mix_is_found_without_labels():
    rng = np.random.default_rng(1)
    means, old, new = np.array([-1.0, 0.5, 2.0]), np.array([0.7, 0.25, 0.05]), np.array([0.4, 0.3, 0.3])
    y = rng.choice(3, 8000, p=new)
    x = rng.normal(means[y])
    density = np.exp(-0.5 * (x[:, None] - means) ** 2) * old
    p = density / density.sum(1, keepdims=True)
    assert class_mix(p, old) == pytest.approx(new, abs=0.03)
    resampled = p * np.array([1.0, 2.0, 5.0])
    resampled /= resampled.sum(1, keepdims=True)
    weights = prior_weights(resampled, p.mean(0))
    corrected = resampled * weights
    assert (corrected / corrected.sum(1, keepdims=True)).mean(0) == pytest.approx(p.mean(0), abs=1e-4)
    halves = sum(mix_step(part, old, new) for part in np.array_split(p, 2))
    assert halves == pytest.approx(mix_step(p, old, new))


def test_a_kept_promise_is_doubted_at_some_time_in_at_most_one_life_of_twenty():
    rng, doubted = np.random.default_rng(2), 0
    for _ in range(300):
        hits = rng.random(400) < 0.9
        found = np.cumsum(hits)
        doubted += any(
            evidence_of_loss(int(f), i + 1 - int(f), 0.9) >= np.log(20) for i, f in enumerate(found) if i % 5 == 0
        )
    assert doubted / 300 <= 0.05


def test_a_broken_promise_is_noticed():
    assert evidence_of_loss(78, 22, 0.9) > np.log(20) > evidence_of_loss(91, 9, 0.9)
    assert evidence_of_loss(160, 40, 0.9) > evidence_of_loss(80, 20, 0.9)


def test_a_bet_on_a_recall_is_fair_at_exactly_that_recall():
    for n in (1, 4):  # averaged over what may be seen, the capital stays 1
        worth = sum(binom.pmf(k, n, 0.8) * np.exp(evidence_of_loss(k, n - k, 0.8)) for k in range(n + 1))
        assert worth == pytest.approx(1.0)
