"""Hugging Face data sets and flwr-datasets federations: a stand-in for their interface, and the packages where they
are installed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from PIL import Image as Picture

import fedtail as ft
from fedtail.data.huggingface import load_pooled


class Value:
    """A feature of plain values."""


class Image:
    """A feature of pictures."""


class List:
    """A feature of lists."""


@dataclass
class ClassLabel:
    names: list[str]


@dataclass
class Dataset:
    """What is asked of a ``datasets.Dataset``."""

    columns: dict[str, list[Any]]
    features: dict[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def remove_columns(self, names: list[str]) -> Dataset:
        return replace(self, columns={n: v for n, v in self.columns.items() if n not in names})

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self.columns)

    def rows(self, index: range) -> Dataset:
        return replace(self, columns={n: [v[i] for i in index] for n, v in self.columns.items()})


class Partitioner:
    num_partitions = 2
    partition_id_to_natural_id: ClassVar = {0: "mill", 1: "yard"}


@dataclass
class FederatedDataset:
    """What is asked of a ``flwr_datasets.FederatedDataset``."""

    data: Dataset
    test: Dataset | None = None

    def __post_init__(self) -> None:
        self.partitioners = {"train": Partitioner()}

    def load_partition(self, number: int, split: str) -> Dataset:
        assert split == "train"
        return self.data.rows(range(number, len(self.data), 2))

    def load_split(self, split: str) -> Dataset:
        if self.test is None:
            raise ValueError(f"no split {split}")
        return self.test


def rows(n: int = 120) -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.random(n) < 0.3
    columns: dict[str, list[Any]] = {
        "age": (40 + 10 * y + rng.normal(0, 5, n)).tolist(),
        "town": [("north", "south")[i % 2] for i in range(n)],
        "vector": [[1.0, 2.0]] * n,
        "outcome": y.astype(int).tolist(),
    }
    features = {"age": Value(), "town": Value(), "vector": List(), "outcome": ClassLabel(["mild", "severe"])}
    return Dataset(columns, features)


def pictures(n: int = 60) -> Dataset:
    rng = np.random.default_rng(0)
    images = [Picture.fromarray(rng.integers(0, 255, (9, 8), dtype=np.uint8)) for _ in range(n)]
    columns: dict[str, list[Any]] = {"image": images, "label": [i % 3 for i in range(n)]}
    return Dataset(columns, {"image": Image(), "label": ClassLabel(["good", "scratch", "hole/edge"])})


def test_rows_with_a_site_column_are_a_table_with_the_names_of_classes() -> None:
    found = ft.Federation.from_huggingface(rows(), site="town", validation=0.2)
    assert found.sites == ("north", "south") and found.classes == ("mild", "severe") and found.own == "table"
    table = rows().to_pandas().drop(columns="vector")
    table["outcome"] = np.where(table["outcome"] == 1, "severe", "mild")
    same = ft.Federation.from_tables(table, "outcome", "town", validation=0.2)
    assert found.pool.x.equal(same.pool.x) and found.pool.y.equal(same.pool.y)
    assert "'vector' (as requested)" in " ".join(found.notes)


def test_a_dictionary_of_splits_has_its_own_test_rows() -> None:
    data = rows()
    found = ft.Federation.from_huggingface({"train": data.rows(range(90)), "test": data.rows(range(90, 120))})
    assert len(found.test) == 30 and len(found.pool) == 90
    with pytest.raises(ft.FedtailError, match="split 'train'"):
        ft.Federation.from_huggingface({"all": data})


def test_partitions_of_a_federation_are_its_sites() -> None:
    data = rows()
    found = ft.Federation.from_huggingface(FederatedDataset(data))
    assert found.sites == ("mill", "yard") and found.sizes.sum() < 120
    found = ft.Federation.from_huggingface(FederatedDataset(data, data.rows(range(30))))
    assert len(found.test) == 30 and len(found.pool) == len(np.unique(found.pool.x[:, 0])) == 120
    with pytest.raises(ft.FedtailError, match="leave out site"):
        ft.Federation.from_huggingface(FederatedDataset(data), site="town")


def test_a_column_of_images_makes_a_federation_of_images() -> None:
    found = ft.Federation.from_huggingface(FederatedDataset(pictures()), validation=0.2, size=8)
    assert found.classes == ("good", "hole/edge", "scratch") and found.sites == ("mill", "yard")
    assert found.input_shape == (1, 8, 8) and found.own == "images" and found.preprocessing["kind"] == "images"
    first, stored = pictures()["image"][0], ft.Federation.from_huggingface(FederatedDataset(pictures())).pool.x
    assert any(np.array_equal(np.asarray(first), x[0].numpy()) for x in stored)


def test_what_is_not_there_is_one_line() -> None:
    with pytest.raises(ft.FedtailError, match="column 'town2'"):
        ft.Federation.from_huggingface(rows(), site="town2")
    with pytest.raises(ft.FedtailError, match="a list is no Dataset"):
        ft.Federation.from_huggingface([1, 2])
    two = pictures()
    two.features["more"], two.columns["more"] = Image(), two.columns["image"]
    with pytest.raises(ft.FedtailError, match="images in more than one column: image, more"):
        ft.Federation.from_huggingface(two)
    with pytest.raises(ft.FedtailError, match="use --images"):
        load_pooled(pictures(), pictures=False)


def test_the_packages_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path / "cache", raising=False)
    fake = rows()
    features = datasets.Features(
        age=datasets.Value("float64"),
        town=datasets.Value("string"),
        vector=datasets.Sequence(datasets.Value("float64")),
        outcome=datasets.ClassLabel(names=["mild", "severe"]),
    )
    real = datasets.Dataset.from_dict(fake.columns, features=features)
    found = ft.Federation.from_huggingface(real, site="town")
    assert found.pool.x.equal(ft.Federation.from_huggingface(fake, site="town").pool.x)
    real.train_test_split(0.25, seed=0).save_to_disk(str(tmp_path / "table"))
    pooled = ft.datasets.load("table", path=str(tmp_path / "table"), site="town")
    assert len(pooled.test) == 30 and pooled.classes == ("mild", "severe")
    images = pictures()
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=images.features["label"].names)
    )
    datasets.Dataset.from_dict(images.columns, features=features).save_to_disk(str(tmp_path / "images"))
    assert ft.datasets.load("images", path=str(tmp_path / "images")).train.x.shape[1:] == (1, 9, 8)
    with pytest.raises(ft.FedtailError, match="use --images"):
        ft.datasets.load("table", path=str(tmp_path / "images"))


def test_a_real_federation_of_flwr_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flwr_datasets = pytest.importorskip("flwr_datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    table = rows().to_pandas().drop(columns="vector")
    (tmp_path / "csv").mkdir()
    table[:90].to_csv(tmp_path / "csv" / "train.csv", index=False)
    table[90:].to_csv(tmp_path / "csv" / "test.csv", index=False)
    by_town = partitioner.NaturalIdPartitioner("town")
    federated = flwr_datasets.FederatedDataset(dataset=str(tmp_path / "csv"), partitioners={"train": by_town})
    found = ft.Federation.from_huggingface(federated, "outcome")
    assert set(found.sites) == {"north", "south"} and len(found.test) == 30 and len(found.pool) == 90
