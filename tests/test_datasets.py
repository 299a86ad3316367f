"""``fedtail.datasets``: data sets by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedtail as ft
from fedtail.data.inspection import ratio


def test_load_builds_a_pool_by_name_with_its_options() -> None:
    pooled = ft.datasets.load("digits", imbalance=50)
    assert ratio(pooled.train.counts(10)) > 40 and pooled.name == "digits"
    assert ft.partition(pooled, clients=4, partition="iid").n_clients == 4


def test_unknown_names_and_options_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ft.FedtailError, match="did you mean 'cifar10'"):
        ft.datasets.load("cifar")
    with pytest.raises(ft.FedtailError, match="imbalnce"):
        ft.datasets.load("digits", imbalnce=3)
    with pytest.raises(ft.FedtailError, match="no stable direct link"):
        ft.datasets.load("unsw", data_dir=tmp_path)
    assert ft.datasets.load("digits", data_dir=tmp_path).name == "digits", "sets without files ignore the folder"


def test_get_tells_built_in_sets_apart() -> None:
    assert ft.datasets.get("chips") is None
    with pytest.raises(ft.FedtailError, match="unknown"):
        ft.datasets.get("nothing")


def test_a_data_set_declares_its_validation_share_and_a_user_may_override_it() -> None:
    pooled = ft.datasets.load("digits")
    none = ft.partition(pooled, validation=0.0)
    assert sum(map(len, none.validation)) == 0
    assert 0 < sum(map(len, ft.partition(pooled).validation)) < 0.2 * len(pooled.train)


def test_partition_takes_a_data_set_with_all_it_suggests_or_bare_samples() -> None:
    pooled = ft.datasets.load("digits")
    whole = ft.partition(pooled, clients=4, alpha=1.0, seed=3)
    bare = ft.partition(pooled.train, pooled.test, clients=4, alpha=1.0, seed=3)
    assert (whole.label_map() == bare.label_map()).all() and whole.transform == pooled.transform
    assert whole.classes == pooled.classes and bare.transform != pooled.transform
    with pytest.raises(ft.FedtailError, match="its own test samples"):
        ft.partition(pooled, pooled.test)
    with pytest.raises(ft.FedtailError, match="needs test samples"):
        ft.partition(pooled.train)
