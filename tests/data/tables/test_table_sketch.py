"""Cuts from added counts equal those of pooled rows, and a site tells no count of few values."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.data import DATASETS, table_from_frame
from fedtail.data.tables.columns import Numbers
from fedtail.data.tables.encode import encode
from fedtail.data.tables.schema import Column, TableSchema
from fedtail.data.tables.sketch import (
    BINS,
    column_sketch,
    cuts,
    default_pieces,
    fit_cuts,
    grid,
    merge_sketches,
    pack_sketch,
    unpack_sketch,
)
from fedtail.errors import FedtailError

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=30)


@given(st.lists(VALUES, min_size=1, max_size=5), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_counts_of_sites_add_up_to_those_of_all_rows(sites: list[list[float]], mean: float, std: float) -> None:
    edges = grid(mean, std)
    merged = merge_sketches([column_sketch(np.array(s, dtype=float), edges)[None] for s in sites], 1)[0]
    pooled = column_sketch(np.array([v for s in sites for v in s], dtype=float), edges)
    assert np.array_equal(merged, pooled) and np.array_equal(unpack_sketch(pack_sketch(pooled[None]), 1)[0], pooled)


@given(VALUES, st.integers(2, 8))
def test_no_count_below_the_minimum_leaves_a_site_and_none_is_lost(values: list[float], least: int) -> None:
    known = int((~np.isnan(np.array(values, dtype=float))).sum())
    counts = column_sketch(np.array(values, dtype=float), grid(0.0, 1.0), min_count=least)
    told = counts[counts > 0]
    assert (told >= least).all() and told.sum() == (known if known >= least else 0)


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(1013, 8, 20_000),  # an offset: pressure
        np.exp(np.random.default_rng(1).normal(6, 3, 20_000)),  # seven decades: bytes
        np.random.default_rng(2).integers(1990, 2025, 20_000).astype(float),  # years
    ],
)
def test_cuts_are_quantiles_whatever_the_scale(values: np.ndarray) -> None:
    edges = grid(values.mean(), values.std())
    found = cuts(column_sketch(values, edges), edges, 8)
    shares = np.histogram(values, bins=np.concatenate([[-np.inf], found]))[0][1:] / len(values)
    assert len(found) == 9 and shares.max() < 0.2 and shares.min() > 0.05


def test_a_heavy_value_is_one_cut_and_the_rest_is_still_divided() -> None:
    gains = np.concatenate([np.zeros(9_000), np.exp(np.random.default_rng(0).normal(8, 1, 1_000))])
    edges = grid(gains.mean(), gains.std())
    found = cuts(column_sketch(gains, edges), edges, 8)
    assert len(found) == 9 and found[0] == 0.0 and (np.diff(found) > 0).all()


def test_two_values_need_no_cuts_and_neither_does_an_empty_column() -> None:
    edges = grid(0.5, 0.5)
    assert not len(cuts(column_sketch(np.array([0.0, 1.0] * 50), edges), edges, 8))
    assert not len(cuts(np.zeros(BINS, dtype=np.int64), edges, 8))


def test_pieces_say_how_far_along_a_number_is_and_gaps_are_zero() -> None:
    column = Column("x", "numeric", mean=0.0, std=1.0, missing=True, cuts=(0.0, 1.0, 3.0))
    schema = TableSchema("y", ("a", "b"), (column,))
    rows = encode(schema, {"x": Numbers(np.array([-5.0, 0.5, 2.0, 9.0, np.nan]), integer=False)})
    assert rows[:, 1:3].tolist() == [[0, 0], [0.5, 0], [1, 0.5], [1, 1], [0, 0]] and rows[4].tolist() == [0, 0, 0, 1]
    assert schema.features() == ["x", "x 0 to 1", "x 1 to 3", "x missing"]
    assert TableSchema.from_dict(schema.to_dict()) == schema and schema.unfitted().columns[0].cuts == ()


def test_wide_tables_get_coarser_pieces() -> None:
    assert [default_pieces(n) for n in (1, 16, 32, 300)] == [16, 16, 8, 4]


def test_sites_that_never_meet_get_the_cuts_of_their_joined_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k in range(3):
        frame = pd.DataFrame({"v": rng.normal(k, 1, 400), "y": rng.choice(["a", "b"], 400)})
        frame.to_csv(tmp_path / f"{k}.csv", index=False)
    apart = DATASETS.build("site_tables", path=str(tmp_path), label="y", min_count=1, test_fraction=0.0)
    joined = pd.concat([pd.read_csv(tmp_path / f"{k}.csv") for k in range(3)], ignore_index=True)
    together = table_from_frame(joined, "y", test_fraction=0.0)
    one, other = (p.preprocessing["columns"][0]["cuts"] for p in (apart, together))
    assert np.allclose(one, other, rtol=1e-9) and all(a < b for a, b in pairwise(one))


def test_bad_counts_are_refused() -> None:
    with pytest.raises(FedtailError, match="outside the"):
        unpack_sketch([[[BINS], [3]]], 1)
    with pytest.raises(FedtailError, match="for 1 columns, but the schema has 2"):
        unpack_sketch([[[0], [3]]], 2)
    with pytest.raises(FedtailError, match="invalid bin counts"):
        merge_sketches([np.full((1, BINS), -1)], 1)


def test_a_schema_with_bad_cuts_is_one_clear_line() -> None:
    raw = {"label": "y", "classes": ["a", "b"], "columns": [{"name": "x", "kind": "numeric", "cuts": [2.0, 1.0]}]}
    with pytest.raises(FedtailError, match="cuts must be two or more increasing numbers"):
        TableSchema.from_dict(raw)
    with pytest.raises(FedtailError, match="pieces = -1 is not allowed"):
        TableSchema.from_dict({**raw, "pieces": -1, "columns": [{"name": "x", "kind": "numeric"}]})


def test_fitting_keeps_the_number_of_pieces_that_was_asked_for() -> None:
    schema = TableSchema("y", ("a", "b"), (Column("x", "numeric", mean=0.0, std=1.0),), pieces=4)
    counts = column_sketch(np.random.default_rng(0).normal(size=500), grid(0.0, 1.0))[None]
    assert fit_cuts(schema, counts).columns[0].pieces == 4
