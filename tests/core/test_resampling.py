import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.core.resampling import (
    replication_factors,
    resample_epoch,
    resampled_counts,
)
from fedtail.data.sets import long_tail_counts
from fedtail.errors import FedtailError
from tests.core.closed_forms import resampled_proportions

counts_lists = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)
rates = st.floats(0, 1.5)


def test_golden_factors_and_sizes() -> None:
    np.testing.assert_allclose(replication_factors([100, 10], 0.5), [1, 3.1623], atol=1e-4)
    np.testing.assert_array_equal(resampled_counts([100, 10], 0.5), [100, 32])


@pytest.mark.parametrize(
    ("classes", "n_max", "imbalance", "inflation"),
    [
        (10, 5000, 20, [1.40, 1.73, 2.22, 2.94]),
        (10, 5000, 100, [1.45, 1.90, 2.65, 4.03]),
        (100, 500, 20, [1.46, 1.83, 2.36, 3.14]),
        (100, 500, 100, [1.56, 2.10, 3.00, 4.61]),
    ],
)
def test_epoch_inflation(classes: int, n_max: int, imbalance: float, inflation: list[float]) -> None:
    n = long_tail_counts(n_max, classes, imbalance)
    measured = [resampled_counts(n, r).sum() / n.sum() for r in (0.4, 0.6, 0.8, 1.0)]
    np.testing.assert_allclose(measured, inflation, atol=0.006)


@settings(max_examples=100, deadline=None)
@given(counts_lists, rates, st.integers(0, 2**16))
def test_class_sizes_are_exact_in_every_epoch(counts: list[int], rate: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    epoch = resample_epoch(labels, rate, np.random.default_rng(seed), n_classes=len(counts))
    np.testing.assert_array_equal(np.bincount(labels[epoch], minlength=len(counts)), resampled_counts(counts, rate))


@settings(max_examples=100, deadline=None)
@given(counts_lists, rates, st.integers(0, 2**16))
def test_every_sample_appears_floor_f_times_and_at_most_once_more(counts: list[int], rate: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    epoch = resample_epoch(labels, rate, np.random.default_rng(seed), n_classes=len(counts))
    times = np.bincount(epoch, minlength=len(labels))
    whole = np.floor(replication_factors(counts, rate))[labels]
    assert np.all((times == whole) | (times == whole + 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.floats(0, 1))
def test_proportions_match_the_closed_form_within_one_sample(counts: list[int], rate: float) -> None:
    exact = resampled_counts(counts, rate)
    n = np.array(counts, dtype=float)
    np.testing.assert_allclose(exact, n * (n.max() / n) ** rate, atol=0.5 + 1e-6)
    error = np.abs(exact / exact.sum() - resampled_proportions(counts, rate))
    assert np.all(error <= len(counts) / exact.sum() + 1e-12)


def test_rate_zero_is_a_permutation_and_absent_classes_stay_absent() -> None:
    labels = np.array([0] * 20 + [2] * 3)
    epoch = resample_epoch(labels, 0.0, np.random.default_rng(0), n_classes=4)
    np.testing.assert_array_equal(np.sort(epoch), np.arange(23))
    np.testing.assert_array_equal(resampled_counts([20, 0, 3, 0], 1.0), [20, 0, 20, 0])


def test_rate_one_balances_and_rates_above_one_invert() -> None:
    np.testing.assert_array_equal(resampled_counts([100, 10, 1], 1.0), [100, 100, 100])
    inverted = resampled_counts([100, 10], 2.0)
    assert inverted[1] > inverted[0]


def test_original_epoch_length_takes_as_many_steps_at_every_rate() -> None:
    labels = np.repeat([0, 1], [90, 10])
    for rate in (0.0, 0.5, 1.0):
        epoch = resample_epoch(labels, rate, np.random.default_rng(0), epoch_length="original")
        assert len(epoch) == 100


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_bad_rates_are_named(rate: float) -> None:
    with pytest.raises(FedtailError, match="rate"):
        resampled_counts([3, 1], rate)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_an_epoch_is_in_random_order_whatever_the_order_of_the_rows(rate: float) -> None:
    """Rows sorted by class must not make batches sorted by class."""
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    y = labels[resample_epoch(labels, rate, np.random.default_rng(0))]
    halves = np.array([np.bincount(half, minlength=3) for half in np.array_split(y, 2)])
    np.testing.assert_allclose(halves, np.tile(np.bincount(y) / 2, (2, 1)), rtol=0.4)


def test_every_epoch_draws_anew_who_appears_once_more() -> None:
    labels, rng = np.repeat([0, 1], [80, 20]), np.random.default_rng(0)  # at rate .5 each rare sample counts twice
    labels = np.concatenate([labels, np.full(13, 2)])  # ... and this class, f = 2.48: six of 13 appear a third time
    often = [np.flatnonzero(np.bincount(resample_epoch(labels, 0.5, rng)) == 3) for _ in range(30)]
    assert {len(found) for found in often} == {6}
    assert len(np.unique(np.concatenate(often))) == 13
