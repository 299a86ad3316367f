"""Thousands of clients over hundreds of thousands of samples; `benchmarks/scale.py` has the seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtail.data import Samples, partition
from fedtail.data.partitions import split
from fedtail.settings import PARTITIONS


@pytest.mark.parametrize("how", PARTITIONS[1:-2])
def test_every_sample_of_two_thousand_clients_is_somewhere(how: str) -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(20, size=200_000, p=(w := 0.8 ** np.arange(20)) / w.sum())
    pool = Samples(torch.zeros(len(y), 1), torch.from_numpy(y))
    test = Samples(torch.zeros(20, 1), torch.arange(20))
    fed = partition(
        pool, test, partition=how, clients=2_000, column=rng.integers(0, 2_000, len(y)), min_samples=1, auxiliary=5
    )
    assert fed.n_clients == 2_000 and fed.label_map().sum() == fed.sizes.sum()
    held = sum(map(len, fed.validation))
    assert fed.sizes.sum() + held + len(fed.auxiliary) == len(y)
    assert held == pytest.approx(0.1 * len(y), rel=0.25)


def test_columns_of_any_type_give_one_client_per_value_in_the_order_of_their_names() -> None:
    y = np.zeros(6, dtype=np.int64)
    for column, names, first in (
        ([10, 2, 10, 2, 2, 10], ["10", "2"], [0, 2, 5]),
        (["b", "a", "b", "a", "a", "a"], ["a", "b"], [1, 3, 4, 5]),
        (np.array([1.5, np.nan, 1.5, 1.5, np.nan, 1.5]), ["1.5", "nan"], [0, 2, 3, 5]),
        ([None, "x", None, "x", "x", "x"], ["nan", "x"], [0, 2]),
    ):
        parts, got = split(y, "column", 1, column=column)
        assert got == names and parts[0].tolist() == first
        assert sorted(np.concatenate(parts).tolist()) == list(range(6))
