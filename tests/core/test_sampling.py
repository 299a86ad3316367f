from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.core.resampling import resample_epoch, resampled_counts
from fedtail.core.sampling import SAMPLERS, epoch_counts, local_batches
from fedtail.errors import FedtailError

counts_st = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(lambda c: sum(c) > 0)


def plan(counts: list[int], sampler: str, *, rate: float = 0.0, batch_size: int = 12, epochs: int = 1, seed: int = 0):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    rng = np.random.default_rng(seed)
    index, sizes = local_batches(
        labels, rate, rng, sampler=sampler, batch_size=batch_size, epochs=epochs, n_classes=len(counts)
    )
    assert sizes.sum() == len(index)
    return labels, np.split(index, np.cumsum(sizes)[:-1]) if len(sizes) else []


def test_shuffled_batches_are_the_resampled_epochs_cut_up_and_only_the_last_is_short() -> None:
    labels, batches = plan([50, 5, 2], "shuffled", rate=0.5, batch_size=16, epochs=2)
    rng = np.random.default_rng(0)
    epochs = [resample_epoch(labels, 0.5, rng, n_classes=3) for _ in range(2)]
    assert np.concatenate(batches).tolist() == np.concatenate(epochs).tolist()
    sizes, n = [len(b) for b in batches], int(resampled_counts([50, 5, 2], 0.5).sum())
    assert sizes == 2 * [*[16] * (n // 16), n % 16]


@given(counts_st, st.floats(0.0, 1.0), st.integers(1, 20))
def test_stratified_batches_hold_each_class_in_proportion(counts: list[int], rate: float, batch_size: int) -> None:
    labels, batches = plan(counts, "stratified", rate=rate, batch_size=batch_size)
    sizes = epoch_counts(np.array(counts), rate, "stratified", batch_size)
    seen = np.bincount(labels[np.concatenate(batches)], minlength=len(counts))
    np.testing.assert_array_equal(seen, sizes)
    share = sizes / sizes.sum()
    for batch in batches:
        have = np.bincount(labels[batch], minlength=len(counts))
        assert (np.abs(have - share * len(batch)) <= 1 + len(counts) * share + 1e-9).all()


def test_stratified_batches_hold_every_class_that_is_large_enough() -> None:
    labels, batches = plan([800, 80, 16], "stratified", batch_size=64)
    for batch in batches[:-1]:
        assert set(labels[batch]) == {0, 1, 2}
    _, shuffled = plan([800, 80, 16], "shuffled", batch_size=64)
    assert any(2 not in labels[b] for b in shuffled[:-1])


@given(counts_st, st.integers(1, 40))
def test_balanced_batches_hold_equal_numbers_of_every_class_present(counts: list[int], batch_size: int) -> None:
    labels, batches = plan(counts, "balanced", batch_size=batch_size)
    present = np.flatnonzero(counts)
    each = max(1, min(batch_size // len(present), max(counts)))
    for batch in batches:
        have = np.bincount(labels[batch], minlength=len(counts))
        assert (have[present] == each).all()
        assert have.sum() == each * len(present)
    total = np.bincount(labels[np.concatenate(batches)], minlength=len(counts))
    np.testing.assert_array_equal(total, epoch_counts(np.array(counts), 0.7, "balanced", batch_size))


def test_balanced_epochs_show_every_sample_and_reshuffle_rare_classes_evenly() -> None:
    labels, batches = plan([50, 10, 3], "balanced", batch_size=15)
    drawn = np.bincount(np.concatenate(batches), minlength=len(labels))
    assert (drawn >= 1).all()
    for c in range(3):
        assert np.ptp(drawn[labels == c]) <= 1


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_depends_on_its_generator_only(sampler: str) -> None:
    one, two, other = (plan([30, 7, 2], sampler, rate=0.5, seed=s)[1] for s in (4, 4, 5))
    assert [b.tolist() for b in one] == [b.tolist() for b in two]
    assert [b.tolist() for b in one] != [b.tolist() for b in other]


def test_one_sample_is_one_batch() -> None:
    for sampler in SAMPLERS:
        _, batches = plan([0, 1, 0], sampler)
        assert [b.tolist() for b in batches] == [[0]]


def test_an_unknown_sampler_is_an_error() -> None:
    with pytest.raises(FedtailError, match="stratified"):
        plan([3, 2], "stratify")


def test_a_class_starts_anywhere_in_a_stratified_epoch() -> None:
    """A single sample is as likely in the first batch as in the last."""
    at = []
    for seed in range(60):
        labels, batches = plan([39, 1], "stratified", batch_size=10, seed=seed)
        at += [i for i, batch in enumerate(batches) if (labels[batch] == 1).any()]
    assert np.bincount(at, minlength=4).min() >= 5
