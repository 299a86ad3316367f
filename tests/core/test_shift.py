"""Tests of a model's life: valid at any look, and with power where something changed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, fisher_exact, hypergeom

from fedtail.core.shift import cell_density, class_mix, drift_p, evidence_of_loss, prior_weights, spent, tail


def test_all_looks_together_spend_at_most_alpha():
    total = sum(spent(0.05, look) for look in range(1, 100_000))
    assert 0.0499 < total < 0.05


def test_two_bins_are_fishers_exact_test():
    a, b = np.array([40, 10]), np.array([12, 12])
    one_sided = fisher_exact([a, b], alternative="greater").pvalue
    assert 1.0 <= drift_p(a, b) / (2 * one_sided) < 1.3
    a, b = np.array([400, 100]), np.array([30, 40])
    assert 1.0 <= drift_p(a, b) / (2 * fisher_exact([a, b], alternative="greater").pvalue) < 1.06


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 60), st.integers(1, 60))
def test_a_tail_is_never_below_that_of_fishers_test_and_close_where_it_is_small(a: int, b: int, c: int, d: int):
    exact = hypergeom.sf(d - 1, a + b + c + d, b + d, c + d)
    p = float(tail(np.array(b), np.array(d), np.array(a + b), np.array(c + d)))
    assert p >= exact * (1 - 1e-9) and (exact > 0.001 or p <= 1.12 * exact)


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


def counted(p: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(C, M) rows by class and cell, (M, C) probabilities summed over cells; a cell is the likeliest class and how
    likely it is."""
    c = p.shape[1]
    cell = p.argmax(1) * 20 + (p.max(1) * 20).clip(max=19).astype(int)
    mass = np.zeros((20 * c, c))
    np.add.at(mass, cell, p)
    return np.bincount(y * 20 * c + cell, minlength=20 * c * c).reshape(c, -1), mass


def test_the_class_mix_is_found_without_labels():
    rng = np.random.default_rng(1)
    means, old, new = np.array([-1.0, 0.5, 2.0]), np.array([0.7, 0.25, 0.05]), np.array([0.4, 0.3, 0.3])

    def rows(shares: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(3, n, p=shares)
        density = np.exp(-0.5 * (rng.normal(means[y])[:, None] - means) ** 2) * old
        return density / density.sum(1, keepdims=True), y

    truth, mass = counted(*rows(old, 3000))
    cells = counted(*rows(new, 8000))[0].sum(0)
    assert class_mix(cells, cell_density(truth, mass), old) == pytest.approx(new, abs=0.04)
    p, y = rows(old, 8000)
    resampled = p * np.array([1.0, 2.0, 5.0])
    truth, mass = counted(resampled / resampled.sum(1, keepdims=True), y)
    weights = prior_weights(mass, truth.sum(0), p.mean(0))
    assert weights == pytest.approx([1.0, 0.5, 0.2], rel=0.15)


def test_a_class_without_reference_rows_lies_where_the_model_expects_it():
    truth, mass = np.array([[90, 10], [0, 0]]), np.array([[80.0, 10.0], [2.0, 8.0]])
    density = cell_density(truth, mass)
    assert density[1] == pytest.approx([10 / 18, 8 / 18]) and density.sum(1) == pytest.approx(1.0)
    assert class_mix(np.zeros(2), density, np.array([0.9, 0.1])) == pytest.approx([0.9, 0.1])


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
