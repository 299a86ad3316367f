"""Promises from counts: exact against simulation, and conservative where counts are binned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from fedtail.core.promise import (
    cost_bound,
    most_promised,
    prediction_sets,
    promise_recall,
    samples_needed,
    set_thresholds,
    tolerance_rank,
)
from fedtail.core.scores import BINS, Scores, bin_edges, bin_of


def counted(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(bin_of(x), minlength=BINS) for x in (others, own)])


def test_fifty_nine_cases_promise_95_at_95():
    assert samples_needed(0.95, 0.95) == 59
    assert tolerance_rank(58, 0.95, 0.95) == 0
    assert tolerance_rank(59, 0.95, 0.95) == 1
    assert most_promised(59, 0.95) >= 0.95 > most_promised(58, 0.95)


@given(st.integers(1, 400), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_the_rank_is_the_largest_that_the_binomial_tail_allows(n: int, recall: float, confidence: float):
    rank = tolerance_rank(n, recall, confidence)
    enough = [k for k in range(1, n + 1) if binom.sf(k - 1, n, 1 - recall) >= confidence]
    assert rank == (max(enough) if enough else 0)
    assert (n >= samples_needed(recall, confidence)) == (rank > 0)


def test_a_promised_recall_is_kept_as_often_as_said_and_not_always():
    rng, kept, runs = np.random.default_rng(0), 0, 400
    for _ in range(runs):
        own = rng.beta(3, 2, 300)
        found = promise_recall(counted(own, rng.beta(2, 5, 500)), 0.9, 0.8)
        kept += beta.sf(found.threshold, 3, 2) >= 0.9
    assert 0.76 <= kept / runs <= 0.88  # binomial noise of .02 around .80 and a little above (ranks are whole)


def test_too_few_cases_promise_what_their_lowest_score_allows_and_say_how_many_are_missing():
    own = np.linspace(0.3, 0.9, 48)
    found = promise_recall(counted(own, np.array([0.1, 0.35])), 0.95, 0.95)
    assert not found.kept and found.recall == pytest.approx(0.05 ** (1 / 48))
    assert found.threshold <= own[0] and found.found == 48 and found.alarms == 1
    assert found.sentence("fatal") == (
        "59 cases of 'fatal' would be needed to promise 95 % at 95 %; there are 48; "
        "the most that can be promised is 93.9 %"
    )


def test_a_binned_threshold_never_lies_above_the_score_it_stands_for():
    rng = np.random.default_rng(1)
    for n in (30, 77, 500):
        own = rng.random(n)
        found = promise_recall(counted(own, rng.random(10)), 0.9, 0.9)
        exact = np.sort(own)[tolerance_rank(n, 0.9, 0.9) - 1]
        assert found.threshold <= exact and bin_of(np.array([found.threshold + 1e-12]))[0] <= bin_of(exact[None])[0]
        assert found.found >= n - tolerance_rank(n, 0.9, 0.9) + 1


def test_no_cases_promise_nothing():
    found = promise_recall(np.zeros((2, BINS), dtype=int), 0.95, 0.9)
    assert found.recall == 0 and found.threshold == 0 and not found.kept


def test_the_promise_survives_json():
    found = promise_recall(counted(np.linspace(0.2, 0.9, 80), np.linspace(0.1, 0.5, 40)), 0.9, 0.9)
    assert type(found).from_json(found.to_json()) == found


def test_the_cost_bound_holds_in_simulation_and_shrinks():
    rng, costs = np.random.default_rng(2), np.array([[0.0, 1.0], [20.0, 0.0]])
    cells, truth = np.array([0.85, 0.05, 0.02, 0.08]), 0.85 * 0 + 0.05 * 1 + 0.02 * 20
    bounds = [cost_bound(rng.multinomial(800, cells).reshape(2, 2), costs, 0.9)[1] for _ in range(200)]
    assert np.mean(np.array(bounds) >= truth) >= 0.9
    assert cost_bound(8000 * cells.reshape(2, 2), costs, 0.9)[1] < np.mean(bounds)
    assert cost_bound(np.zeros((2, 2)), costs, 0.9)[1] != cost_bound(np.eye(2), costs, 0.9)[1]


def test_sets_cover_every_class_and_rare_ones_with_too_few_samples_are_always_in():
    rng = np.random.default_rng(3)
    covered = np.zeros(3)
    for _ in range(100):
        y = rng.choice(3, 600, p=[0.75, 0.2, 0.05])
        z = rng.normal(size=(600, 3)) + 2 * np.eye(3)[y]
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        limits = set_thresholds(Scores.of(p[:300], y[:300]).bins, 0.9)
        sets = prediction_sets(p[300:], limits)
        covered += [sets[y[300:] == c, c].mean() for c in range(3)]
    assert (covered / 100 >= 0.89).all() and covered[0] / 100 < 0.95
    few = set_thresholds(Scores.of(p[:20], np.zeros(20, dtype=int)).bins, 0.9)
    assert few[1] == few[2] == 0.0 < few[0]


def test_no_set_is_empty():
    sets = prediction_sets(np.array([[0.4, 0.35, 0.25]]), (0.5, 0.5, 0.5))
    assert sets.tolist() == [[True, False, False]]


def test_edges_and_bins_agree():
    edges = bin_edges()
    assert (bin_of(edges[1:] + 1e-13) >= np.arange(1, BINS) - 1).all()
