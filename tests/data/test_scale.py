"""Ten thousand clients and a million samples are split in seconds."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from fedtail.data import Samples, partition
from fedtail.data.partitions import PARTITIONS, split


@pytest.mark.slow
@pytest.mark.parametrize("scheme", PARTITIONS)
def test_ten_thousand_clients_of_a_million_samples_are_split_in_seconds(scheme: str) -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(20, size=1_000_000, p=(w := 0.8 ** np.arange(20)) / w.sum())
    pool = Samples(torch.zeros(len(y), 1), torch.from_numpy(y))
    test = Samples(torch.zeros(20, 1), torch.arange(20))
    began = time.perf_counter()
    fed = partition(
        pool, test, scheme=scheme, clients=10_000, column=rng.integers(0, 10_000, len(y)), min_samples=1, auxiliary=5
    )
    took = time.perf_counter() - began
    assert took < 60, "minutes here mean that a step is quadratic in clients or samples (it takes about 5 s)"
    assert fed.n_clients == 10_000 and fed.label_map().sum() == fed.sizes.sum()
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
