import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.core.grouping import group_classes
from fedtail.data.sets import long_tail_counts
from fedtail.errors import FedtailError
from tests.core.closed_forms import resampled_proportions, within_group_scatter

# Few distinct values, so that ties are common.
vectors = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.2, 0.3, 0.5, 1.0, 2.0]), min_size=1, max_size=9).filter(any)


def sorted_sizes(groups: np.ndarray, q: np.ndarray, h: int) -> list[int]:
    return [int(((groups == g) & (q > 0)).sum()) for g in range(h)]


def brute_force(q: np.ndarray, h: int) -> np.ndarray:
    """Best contiguous partition by enumeration: least cost, most even sizes, fewest minority classes."""
    order = [c for c in sorted(range(len(q)), key=lambda c: (-q[c], c)) if q[c] > 0]
    out = np.full(len(q), h - 1)
    if len(order) <= h:
        out[order] = np.arange(len(order))
        return out
    best = None
    for cuts in itertools.combinations(range(1, len(order)), h - 1):
        edges = [0, *cuts, len(order)]
        parts = [order[a:b] for a, b in itertools.pairwise(edges)]
        cost = sum(((q[p] - q[p].mean()) ** 2).sum() for p in parts)
        key = (round(cost, 11), sum(len(p) ** 2 for p in parts), [len(p) for p in reversed(parts)])
        if best is None or key < best[0]:
            best = (key, parts)
    for g, part in enumerate(best[1]):
        out[part] = g
    return out


@settings(max_examples=300, deadline=None)
@given(vectors, st.integers(1, 3))
def test_dynamic_programme_equals_brute_force_with_ties(values: list[float], h: int) -> None:
    q = np.array(values)
    np.testing.assert_array_equal(group_classes(q, h), brute_force(q, h))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.integers(1, 6),
    st.sampled_from([0.5, 2.0, 1024.0]),
    st.integers(0, 64),
)
def test_partition_is_invariant_under_positive_affine_maps(values: list[int], h: int, a: float, b: int) -> None:
    q = np.array(values, dtype=float)
    np.testing.assert_array_equal(group_classes(q, h), group_classes(a * q + b, h))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=30))
def test_scatter_does_not_grow_with_more_groups(values: list[float]) -> None:
    scatter = [within_group_scatter(values, group_classes(values, h)) for h in range(1, len(values) + 1)]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(scatter))
    assert scatter[-1] == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.0, 5.0, 9.0]), min_size=4, max_size=20), st.integers(2, 4))
def test_equal_values_stay_together_when_there_are_enough_distinct_ones(values: list[float], h: int) -> None:
    q = np.array(values)
    if len(np.unique(q)) < h:
        return
    groups = group_classes(q, h)
    for v in np.unique(q):
        assert len(np.unique(groups[q == v])) == 1


def test_majority_is_group_zero_and_classes_without_samples_join_the_rarest_group() -> None:
    np.testing.assert_array_equal(group_classes([0, 50, 2, 60, 0, 1]), [1, 0, 1, 0, 1, 1])


def test_all_equal_proportions_split_evenly() -> None:
    np.testing.assert_array_equal(group_classes(np.full(10, 0.1)), [0] * 5 + [1] * 5)
    np.testing.assert_array_equal(group_classes(np.full(7, 0.3)), [0] * 4 + [1] * 3)  # fewer minority classes


@pytest.mark.parametrize("noise", [0.0, 1e-16, 3e-16])
def test_rounding_noise_does_not_decide_between_ties(noise: float) -> None:
    q = np.full(100, 0.01) + noise * np.random.default_rng(0).standard_normal(100)
    assert sorted_sizes(group_classes(q), q, 2) == [50, 50]


def test_fewer_present_classes_than_groups_leaves_groups_empty() -> None:
    np.testing.assert_array_equal(group_classes([5.0, 0.0, 3.0], 4), [0, 3, 1])


@pytest.mark.parametrize(
    ("n_max", "classes", "imbalance", "rate", "minority"),
    [
        (5000, 10, 20, 0.0, 7), (5000, 10, 20, 0.4, 7), (5000, 10, 20, 0.5, 6), (5000, 10, 20, 0.8, 6),
        (5000, 10, 100, 0.0, 8), (5000, 10, 100, 0.6, 7), (5000, 10, 100, 0.8, 6),
        (500, 100, 20, 0.0, 71), (500, 100, 20, 0.4, 64), (500, 100, 20, 0.5, 62), (500, 100, 20, 0.6, 59),
        (500, 100, 20, 0.8, 55), (500, 100, 100, 0.0, 78), (500, 100, 100, 0.6, 64),
    ],
)  # fmt: skip
def test_minority_sizes_of_the_long_tailed_profiles(
    n_max: int, classes: int, imbalance: float, rate: float, minority: int
) -> None:
    q = resampled_proportions(long_tail_counts(n_max, classes, imbalance), rate)
    assert (group_classes(q) == 1).sum() == minority


@pytest.mark.parametrize(
    ("n_max", "classes", "imbalance", "rate", "h", "sizes"),
    [
        (5000, 10, 20, 0.6, 3, [3, 3, 4]), (5000, 10, 20, 0.6, 4, [2, 2, 3, 3]),
        (500, 100, 20, 0.6, 3, [25, 32, 43]), (500, 100, 20, 0.6, 4, [19, 22, 26, 33]),
        (500, 100, 100, 0.0, 3, [13, 21, 66]), (500, 100, 100, 0.0, 4, [9, 12, 20, 59]),
    ],
)  # fmt: skip
def test_sizes_with_three_and_four_groups(
    n_max: int, classes: int, imbalance: float, rate: float, h: int, sizes: list[int]
) -> None:
    q = resampled_proportions(long_tail_counts(n_max, classes, imbalance), rate)
    assert sorted_sizes(group_classes(q, h), q, h) == sizes


@pytest.mark.parametrize("bad", [[], [[0.5, 0.5]], [0.5, float("nan")], [0.5, -0.1]])
def test_bad_proportions_are_named(bad: list) -> None:
    with pytest.raises(FedtailError, match="proportions"):
        group_classes(bad)


def test_bad_group_count_is_named() -> None:
    with pytest.raises(FedtailError, match="n_groups = 0"):
        group_classes([0.5, 0.5], 0)


@pytest.mark.parametrize(
    ("values", "groups"), [([3.0, 3.0, 1.0, 1.0], [0, 0, 1, 2]), ([1.0, 1.0, 1.0, 2.0, 1.0, 1.0], [1, 1, 1, 0, 2, 2])]
)
def test_rounding_does_not_decide_ties_of_the_standard_deviation(values: list[float], groups: list[int]) -> None:
    """Every partition of few distinct values costs 0; the square root of a rounding error of 1e-16 is 1e-8."""
    assert group_classes(values, 3, dispersion="std").tolist() == groups
    assert group_classes(values, 3).tolist() == groups
