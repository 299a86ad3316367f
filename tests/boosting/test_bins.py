"""Bins come from sums over sites, and lie where the rare class is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.boosting.bins import Bins, Column, columns_of, find_bins, keys_of, read_columns, values_of
from tests.boosting.growing import COLUMNS, table


def found(values: np.ndarray, y: np.ndarray, columns: tuple[Column, ...], most: int = 128) -> Bins:
    return find_bins(columns, int(y.max()) + 1, most, lambda question: question.answer(values, y))[0]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=50))
def test_keys_are_in_the_order_of_values(values: list[float]) -> None:
    given_ = np.array(values, dtype=np.float32)
    keys = keys_of(given_)
    assert np.array_equal(values_of(keys), given_)
    order = np.argsort(given_, kind="stable")
    assert (np.diff(given_[order].astype(np.float64)) > 0).tolist() == (
        np.diff(keys[order].astype(np.int64)) > 0
    ).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 1e-4, 1e6]))
def test_bins_of_a_number_hold_about_the_same_weight(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.lognormal(size=(1, 4000)) * scale).astype(np.float32)
    bins = found(values, np.zeros(4000, dtype=np.int64), (Column("a", 0),), most=32)
    sizes = np.bincount(bins.of(values)[0], minlength=33)[:32]
    assert len(bins.cuts[0]) == 31
    assert sizes.max() <= 2 * 4000 / 32


def test_cuts_lie_where_the_rare_class_is() -> None:
    rng = np.random.default_rng(0)
    y = (np.arange(20_000) < 100).astype(np.int64)
    values = np.where(y == 1, 5 + 0.1 * rng.normal(size=20_000), rng.normal(size=20_000)).astype(np.float32)[None]
    cuts = np.array(found(values, y, (Column("a", 0),), most=64).cuts[0])
    assert ((cuts > 4.5) & (cuts < 5.5)).sum() >= 20


def test_every_value_of_a_few_has_its_own_bin() -> None:
    rng = np.random.default_rng(0)
    ages = rng.integers(17, 90, 5000)
    values = ((ages - 40) / 13).astype(np.float32)[None]
    bins = found(values, np.zeros(5000, dtype=np.int64), (Column("age", 0),)).of(values)[0]
    assert len(np.unique(bins)) == len(np.unique(ages))


def test_rare_and_unknown_levels_are_missing_values() -> None:
    columns = (Column("kind", 0, levels=4),)
    level = np.repeat([0, 1, 2, 3], [50, 30, 3, 0]).astype(np.float32)[None]
    bins = found(level, np.zeros(83, dtype=np.int64), columns)
    assert bins.kept == ((0, 1),)
    assert bins.of(np.array([[0, 1, 2, 3, np.nan]], dtype=np.float32)).tolist() == [[0, 1, 2, 2, 2]]


def test_missing_values_have_the_last_bin() -> None:
    x, y = table()
    values = read_columns(x, COLUMNS)
    bins = found(values, y, COLUMNS)
    got = bins.of(values)
    for f, at in ((2, 7), (3, 9)):
        assert np.array_equal(got[f] == bins.sizes[f] - 1, x[:, at] > 0.5)


def test_columns_follow_from_what_samples_were_made_of() -> None:
    schema = {
        "kind": "table",
        "label": "injury",
        "classes": ["no", "yes"],
        "columns": [
            {"name": "age", "kind": "numeric", "cuts": [0.0, 1.0, 2.0], "missing": True},
            {"name": "road", "kind": "category", "levels": ["a", "b"], "missing": True},
            {"name": "part", "kind": "hashed", "buckets": 8},
        ],
    }
    columns = columns_of(schema, 15, site=3)
    assert [(c.name, c.at, c.levels, c.missing, c.code) for c in columns] == [
        ("age", 0, 0, 3, False),
        ("road", 4, 2, 6, False),
        ("part", 7, 8, -1, False),
        ("site", 15, 3, -1, True),
    ]
    assert [c.name for c in columns_of({}, 2)] == ["column 1", "column 2"]


def test_the_site_is_a_column_and_an_unknown_one_is_missing() -> None:
    column = Column("site", 0, levels=3, code=True)
    values = read_columns(np.array([[0.0], [2.0], [-1.0], [7.0]], dtype=np.float32), (column,))
    assert np.array_equal(values, [[0, 2, np.nan, np.nan]], equal_nan=True)


@pytest.mark.parametrize("n", [0, 1])
def test_columns_without_values_have_no_cuts(n: int) -> None:
    values = np.full((1, 5), np.nan, dtype=np.float32)
    values[0, :n] = 1
    assert found(values, np.zeros(5, dtype=np.int64), (Column("a", 0),)).cuts == ((),)
