"""The real data sets, where FEDTAIL_DATA names a folder that has them. Each test prints its label map."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtail.data import DATASETS, Pooled
from fedtail.data.sources import is_here
from fedtail.errors import FedtailError

pytestmark = pytest.mark.data


def load(name: str, **options: Any) -> Pooled:
    if not os.environ.get("FEDTAIL_DATA"):
        pytest.skip("set FEDTAIL_DATA to the folder that holds the real data sets")
    if not is_here(name):
        pytest.skip(f"FEDTAIL_DATA has no {name}")
    pooled = DATASETS.build(name, **options)
    counts = pooled.train.counts(len(pooled.classes))
    print(f"\n{name} {options}: {len(pooled.train)} training, {len(pooled.test)} test samples")
    print(", ".join(f"{c}: {n}" for c, n in zip(pooled.classes, counts, strict=True)))
    return pooled


@pytest.mark.parametrize(
    ("name", "imbalance", "total", "ends"),
    [("cifar10", 20, 17_023, (5000, 250)), ("cifar10", 100, 12_406, (5000, 50)), ("cifar100", 20, 15_907, (500, 25))],
)
def test_cifar_long_tails_have_exact_counts(name: str, imbalance: float, total: int, ends: tuple[int, int]) -> None:
    pooled = load(name, imbalance=imbalance)
    counts = pooled.train.counts(len(pooled.classes))
    assert counts.sum() == total and (counts[0], counts[-1]) == ends
    assert len(set(pooled.test.counts(len(pooled.classes)).tolist())) == 1 and len(pooled.test) == 10_000
    means = pooled.transform(pooled.test.x).mean((0, 2, 3))
    assert means.abs().max() < 0.05, "the published mean fits the test images"


@pytest.mark.parametrize(("imbalance", "minority"), [(3.17, 10_730), (10, 3_401), (20, 1_701)])
def test_adult_has_104_columns_and_exact_ratios(imbalance: float, minority: int) -> None:
    pooled = load("adult", imbalance=imbalance)
    total = pooled.train.counts(2) + pooled.test.counts(2)
    assert pooled.train.x.shape[1] == 104 and total.tolist() == [34_014, minority]
    assert np.abs(pooled.test.counts(2) - 0.15 * total).max() <= 1
    used = pooled.train.x[:, 6:].any(0).sum() + 0
    assert imbalance > 4 or used >= 97, "every published category occurs"


def test_adult_refuses_a_ratio_below_the_natural_one() -> None:
    load("adult")
    with pytest.raises(FedtailError, match=r"outside \[3.035"):
        load("adult", imbalance=3.0)


def test_unsw_has_196_columns_and_ten_classes() -> None:
    pooled = load("unsw")
    total = pooled.train.counts(10) + pooled.test.counts(10)
    assert pooled.train.x.shape[1] == 196
    assert total.sum() in (82_332, 175_341)
    assert (total[0], total[-1]) in ((37_000, 44), (56_000, 130))
    assert np.abs(pooled.test.counts(10) - 0.15 * total).max() <= 1


def test_elpv_loads_with_its_published_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path))
    pooled = load("elpv")
    total = pooled.train.counts(4) + pooled.test.counts(4)
    assert total.tolist() == [1508, 295, 106, 715]
    assert pooled.train.x.shape[1] == 1 and pooled.sites is not None and set(pooled.sites.tolist()) == {"mono", "poly"}
