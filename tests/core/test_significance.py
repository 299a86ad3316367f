from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedtail.core.significance import holm, paired, sign_flip

numbers = st.lists(st.floats(-1, 1), min_size=2, max_size=8)


@given(numbers)
def test_paired_agrees_with_the_textbook_t_test(values: list[float]) -> None:
    a = dict(enumerate(values))
    b = {i: 0.01 * i for i in range(len(values))}
    d = np.array([a[i] - b[i] for i in a])
    if d.std() < 1e-6:
        return
    got = paired(a, b)
    expected = stats.ttest_1samp(d, 0.0)
    low, high = expected.confidence_interval(0.95)
    assert got is not None
    assert got.p_t == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (got.low, got.high) == pytest.approx((low, high), rel=1e-6)


@given(numbers)
def test_sign_flip_is_never_below_two_over_two_to_the_n(values: list[float]) -> None:
    p = sign_flip(values)
    assert 2 / 2 ** len(values) - 1e-12 <= p <= 1


def test_only_shared_seeds_are_paired() -> None:
    got = paired({0: 0.5, 1: 0.6, 7: 9.0}, {1: 0.5, 0: 0.5, 8: -9.0})
    assert got is not None
    assert (got.n, got.difference) == (2, pytest.approx(0.05))
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_gives_a_difference_but_no_p_value() -> None:
    got = paired({0: 0.6}, {0: 0.5})
    assert got is not None
    assert got.difference == pytest.approx(0.1)
    assert math.isnan(got.p_t) and math.isinf(got.high)


def test_equal_differences_do_not_divide_by_zero() -> None:
    same = paired({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6})
    assert same is not None and same.p_t == 1.0
    shifted = paired({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6})
    assert shifted is not None and math.isnan(shifted.p_t)


def test_holm_is_monotone_and_skips_what_is_not_defined() -> None:
    assert holm([0.04, math.nan, 0.01, 0.03])[::2] == pytest.approx([0.06, 0.03])
    assert holm([0.04, math.nan, 0.01, 0.03])[3] == pytest.approx(0.06)
    assert math.isnan(holm([0.04, math.nan])[1])
