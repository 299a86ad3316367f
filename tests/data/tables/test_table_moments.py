"""Scaling from counts and sums equals scaling from pooled rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.data.tables.schema import Column, TableSchema
from fedtail.data.tables.sketch import column_moments, fit_schema, merge_moments
from fedtail.errors import FedtailError

values = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=20)


@given(st.lists(values, min_size=1, max_size=6))
def test_merged_moments_are_those_of_all_rows(sites: list[list[float]]) -> None:
    merged = merge_moments([column_moments(np.array(s, dtype=float))[None] for s in sites])[0]
    pooled = np.array([v for s in sites for v in s], dtype=float)
    known = pooled[~np.isnan(pooled)]
    assert merged[0] == len(known) and merged[1] == len(pooled) - len(known)
    if len(known):
        assert np.isclose(merged[2], known.mean(), rtol=1e-9, atol=1e-6)
        assert np.isclose(merged[3], known.var() * len(known), rtol=1e-6, atol=1e-3)


def test_the_spread_of_large_numbers_survives() -> None:
    stamps = 1.7e9 + np.random.default_rng(0).normal(size=3000)
    merged = merge_moments([column_moments(part)[None] for part in np.split(stamps, 3)])
    assert np.isclose(np.sqrt(merged[0, 3] / merged[0, 0]), stamps.std(), rtol=1e-6)


@given(st.permutations(range(5)))
def test_order_of_arrival_does_not_change_a_bit(order: list[int]) -> None:
    rng = np.random.default_rng(1)
    parts = [np.stack([column_moments(rng.normal(size=9)) for _ in range(3)]) for _ in range(5)]
    assert np.array_equal(merge_moments(parts), merge_moments([parts[i] for i in order]))


def test_a_site_with_few_values_tells_only_how_many_are_missing() -> None:
    assert column_moments(np.array([3.0, np.nan, 5.0]), min_count=3).tolist() == [0, 1, 0, 0]
    assert column_moments(np.array([3.0, np.nan, 5.0]), min_count=2).tolist() == [2, 1, 4, 2]


def test_fitting_fills_in_scale_and_indicator() -> None:
    schema = TableSchema(
        "y", ("a", "b"), (Column("u", "numeric"), Column("c", "category", ("x",)), Column("v", "numeric"))
    )
    assert not schema.fitted
    fitted = fit_schema(schema, np.array([[4.0, 1.0, 2.0, 16.0], [3.0, 0.0, 7.0, 0.0]]))
    u, c, v = fitted.columns
    assert fitted.fitted and (u.mean, u.std, u.missing) == (2.0, 2.0, True) and c == schema.columns[1]
    assert (v.mean, v.std, v.missing) == (7.0, 1.0, False)


def test_moments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(FedtailError, match="no site"):
        merge_moments([])
    with pytest.raises(FedtailError, match="one schema"):
        merge_moments([np.zeros((2, 4)), np.zeros((3, 4))])
    for bad in (np.nan, -1.0):
        with pytest.raises(FedtailError, match="negative or not finite"):
            merge_moments([np.full((1, 4), bad)])
    with pytest.raises(FedtailError, match="1 numeric columns"):
        fit_schema(TableSchema("y", ("a", "b"), (Column("u", "numeric"),)), np.zeros((2, 4)))
