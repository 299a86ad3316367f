"""Looking at a federation before training."""

from __future__ import annotations

import numpy as np
import pytest

from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.data import Federation
from fedtail.data.inspection import inspect, ratio
from fedtail.errors import FedtailError


def federation(table: list[list[int]]) -> Federation:
    """Sites with exactly these training counts."""
    n_classes = len(table[0])
    clients = []
    for row in table:
        y = np.repeat(np.arange(n_classes), row)
        clients.append((np.zeros((len(y), 2), dtype=np.float32), y))
    y = np.arange(n_classes)
    return Federation.from_arrays(
        clients, (np.zeros((n_classes, 2)), y), classes=[f"c{i}" for i in range(n_classes)], validation=0.0
    )


def test_counts_imbalance_and_missing_classes_are_those_of_the_sites() -> None:
    found = inspect(federation([[100, 10, 0], [5, 5, 20]]), rate=0.5)
    assert found.table.tolist() == [[100, 10, 0], [5, 5, 20]] and found.total.tolist() == [105, 15, 20]
    assert found.imbalance.tolist() == [10.0, 4.0]
    assert found.missing(0) == ("c2",) and found.missing(1) == ()
    assert found.test.tolist() == [1, 1, 1] and found.to_dict()["sites"][0]["missing"] == ["c2"]


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8])
def test_groups_are_what_each_site_would_make_in_training(rate: float) -> None:
    table = [[500, 300, 40, 9, 3], [7, 0, 200, 30, 1], [500, 300, 40, 9, 3]]
    found = inspect(federation(table), rate=rate)
    for row, groups, epoch in zip(table, found.groups, found.epoch, strict=True):
        resampled = resampled_counts(row, rate)
        assert epoch == resampled.sum()
        expected = np.where(resampled > 0, group_classes(resampled, 2), -1)
        assert groups.tolist() == expected.tolist()


def test_skew_is_zero_for_equal_mixes_and_near_one_for_disjoint_ones() -> None:
    assert inspect(federation([[40, 10], [80, 20]])).skew == pytest.approx(0)
    apart = np.eye(10, dtype=int) * 30
    assert inspect(federation(apart.tolist())).skew == pytest.approx(0.9)


def test_ratio_ignores_absent_classes() -> None:
    assert ratio(np.array([10, 0, 2])) == 5 and np.isnan(ratio(np.zeros(3)))


def test_a_rate_below_zero_is_refused() -> None:
    with pytest.raises(FedtailError, match=r"rate = -1 must be at least 0"):
        inspect(federation([[3, 3]]), rate=-1)
