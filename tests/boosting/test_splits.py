"""A split is the best one, found from sums alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.boosting.bins import Bins, Column
from fedtail.boosting.histograms import Fields, Rows
from fedtail.boosting.splits import L2, Finder
from fedtail.errors import FedtailError


def some_bins(cuts: int = 5, levels: int = 6) -> Bins:
    columns = (Column("number", 0), Column("kind", 1, levels=levels))
    return Bins(columns, (tuple(float(i) for i in range(cuts)), ()), ((), tuple(range(levels))))


def rows_of(bins: Bins, n: int, seed: int, missing: float = 0.2) -> Rows:
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.integers(0, size - 1, n) for size in bins.sizes])
    drawn = np.where(rng.random(drawn.shape) < missing, bins.sizes[:, None] - 1, drawn).astype(np.uint8)
    return Rows(drawn, (drawn[0] % 2 + (rng.random(n) < 0.3)).astype(np.int64) % 2, np.zeros(1))


def packed_sums(rows: Rows, bins: Bins, fields: Fields) -> np.ndarray:
    rows.begin()
    rows.differentiate(fields, np.array([0.5, 2.0]), tree=3)
    return rows.histograms([0], [0], range(len(bins.sizes)), bins.sizes)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.integers(0, 10**6))
def test_sums_are_those_of_the_rows_in_every_bin(n: int, seed: int) -> None:
    bins, fields = some_bins(), Fields.of(n, 2.0 * n)
    rows = rows_of(bins, n, seed)
    sums = packed_sums(rows, bins, fields)[0]
    for f, (offset, size) in enumerate(zip(bins.offsets, bins.sizes, strict=True)):
        for b in range(size):
            inside = rows.bins[f] == b
            assert sums[offset + b] == rows.packed[0][inside].sum()
            assert fields.rows(sums[offset + b : offset + b + 1])[0] == inside.sum()
    p = rows.probabilities()[1]
    w = np.array([0.5, 2.0])[rows.y]
    g, h = fields.sums(np.array([rows.packed[0].sum()]))
    assert g[0] == pytest.approx((w * (p - rows.y)).sum(), abs=n * 2.0**-fields.gradient)
    assert h[0] == pytest.approx((w * p * (1 - p)).sum(), abs=n * 2.0**-fields.hessian)


@settings(max_examples=25, deadline=None)
@given(st.integers(30, 300), st.integers(0, 10**6))
def test_the_split_of_a_number_is_the_best_of_all_cuts_with_missing_values_on_either_side(n: int, seed: int) -> None:
    bins = Bins((Column("number", 0),), ((0.0, 1.0, 2.0, 3.0),), ((),))
    fields = Fields.of(n, 2.0 * n)
    rows = rows_of(bins, n, seed)
    sums = packed_sums(rows, bins, fields)
    best = Finder(bins, fields, 3, range(len(bins.columns))).best(sums)[0]
    g, h = fields.sums(rows.packed[0])

    def gain(left: np.ndarray) -> float:
        sides = (left, ~left, np.ones_like(left))
        scores = [g[s].sum() ** 2 / (h[s].sum() + L2) for s in sides]
        return float(scores[0] + scores[1] - scores[2])

    tried = [(rows.bins[0] <= b) & (rows.bins[0] < 5) for b in range(5)]
    tried += [(rows.bins[0] <= b) | (rows.bins[0] == 5) for b in range(4)]
    allowed = [gain(left) for left in tried if min(left.sum(), (~left).sum()) >= 3]
    if best is None:
        assert max(allowed, default=0.0) <= 1e-7
        return
    assert best.gain == pytest.approx(max(allowed), rel=1e-9)
    left = best.left[rows.bins[0]]
    assert best.gain == pytest.approx(gain(left), rel=1e-9)
    assert best.sums.tolist() == [rows.packed[0][left].sum(), rows.packed[0][~left].sum()]


def test_levels_go_left_by_their_gradients_wherever_they_stand() -> None:
    bins = some_bins()
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 6, 600)
    rows = Rows(np.stack([np.zeros(600), kind]).astype(np.uint8), (kind % 2).astype(np.int64), np.zeros(1))
    fields = Fields.of(600, 1200.0)
    best = Finder(bins, fields, 5, range(len(bins.columns))).best(packed_sums(rows, bins, fields))[0]
    assert best is not None and best.column == 1
    assert set(np.flatnonzero(best.left)) in ({0, 2, 4}, {1, 3, 5})


def test_a_node_without_anything_to_gain_is_a_leaf() -> None:
    bins = some_bins()
    rows = Rows(np.zeros((2, 50), dtype=np.uint8), np.arange(50) % 2, np.zeros(1))
    fields = Fields.of(50, 100.0)
    assert Finder(bins, fields, 1, range(len(bins.columns))).best(packed_sums(rows, bins, fields)) == [None]


@pytest.mark.parametrize("few", [np.arange(50) < 2, np.arange(50) >= 48], ids=["left", "right"])
def test_neither_child_has_fewer_rows_than_a_leaf_may(few: np.ndarray) -> None:
    bins = Bins((Column("number", 0),), ((0.0,),), ((),))
    for side in (few, ~few):  # the class follows the only cut, so that all there is to gain lies there
        rows = Rows(side[None].astype(np.uint8), few.astype(np.int64), np.zeros(1))
        fields = Fields.of(50, 100.0)
        assert Finder(bins, fields, 3, range(1)).best(packed_sums(rows, bins, fields)) == [None]
        assert Finder(bins, fields, 2, range(1)).best(packed_sums(rows, bins, fields)) != [None]


@pytest.mark.parametrize("n", [1, 100, 65_534, 65_535, 70_000, 1_000_000, 8_000_000])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_field_runs_over_into_the_next_whatever_rows_weigh(n: int, sign: float) -> None:
    fields = Fields.of(n, float(n))
    highest = np.uint64(2**63 - 1)
    one = fields.pack(np.array([sign]), np.array([0.25]), np.array([highest]))  # rounded up wherever it can be
    total = int(one[0]) * n
    assert abs(total) < 2**62
    g, h = fields.sums(np.array([total]))
    assert g[0] == pytest.approx(sign * n, abs=n * 2.0**-fields.gradient)
    assert h[0] == pytest.approx(0.25 * n, abs=n * 2.0**-fields.hessian)


def test_what_rounding_takes_it_gives_back_on_average() -> None:
    n = 200_000
    fields = Fields.of(400_000, 400_000.0)
    noise = np.random.default_rng(0).integers(0, 2**63, n).astype(np.uint64)
    small = 2.0**-fields.gradient / 50
    total = np.array([fields.pack(np.full(n, small), np.full(n, 0.1), noise).sum()])
    assert fields.sums(total)[0][0] == pytest.approx(n * small, rel=0.1)
    assert fields.rows(total)[0] == pytest.approx(n, rel=0.1)


def test_more_rows_than_can_be_added_up_are_refused() -> None:
    with pytest.raises(FedtailError, match="rows are more than trees can add up exactly"):
        Fields.of(10**8, 1e8)
