"""``Federation.from_datasets``: torch data sets of any kind, and one clear line for those that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fedtail.data import Federation
from fedtail.data.own import read_dataset
from fedtail.errors import FedtailError


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((2,), float(i)), i % 2) for i in range(6)])


TENSORS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("dataset", "shape", "labels"),
    [
        (TENSORS, (6, 2), [0, 1, 0, 1, 0, 1]),
        (Subset(TENSORS, [1, 3]), (2, 2), [1, 1]),
        (Subset(Items([(1.0, "a"), (2.0, "b")]), [1]), (1,), ["b"]),
        (Stream(), (6, 2), [0, 1, 0, 1, 0, 1]),
        (Items([(np.zeros((3, 4)), np.int64(7)), (np.ones((3, 4)), torch.tensor(8))]), (2, 3, 4), [7, 8]),
        (Items([(Image.new("L", (5, 4)), 0), (Image.new("L", (5, 4)), 1)]), (2, 1, 4, 5), [0, 1]),
        (Items([(Image.new("RGB", (5, 4)), 0)]), (1, 3, 4, 5), [0]),
        (Items([([1.0, 2.0], torch.tensor([3]))]), (1, 2), [3]),
    ],
)
def test_every_kind_of_data_set_is_read(dataset: Any, shape: tuple[int, ...], labels: list[Any]) -> None:
    x, y = read_dataset(dataset, "client 0")
    assert x.shape == shape and y.tolist() == labels


def test_clients_share_one_label_map_and_string_labels_are_named() -> None:
    one = Items([(torch.zeros(2), "ok"), (torch.ones(2), "bad")])
    two = Items([(torch.zeros(2), "ok"), (torch.ones(2), "ok")])
    federation = Federation.from_datasets([one, two], one, validation=0.0, sites=["x", "y"])
    assert federation.classes == ("bad", "ok") and federation.label_map().tolist() == [[1, 1], [0, 2]]
    assert federation.sites == ("x", "y")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Items([]), "client 1 has no samples"),
        (Items([torch.zeros(2)]), r"client 1: sample 0 is a Tensor, not an \(input, label\) pair"),
        (Items([{"x": 1}]), "sample 0 is a dict"),
        (Items([("text", 0)]), "the input of sample 0 is a str"),
        (Items([(torch.zeros(2), torch.zeros(3))]), r"the label of sample 0 has shape \(3,\)"),
        (Items([(torch.zeros(2), 0), (torch.zeros(3), 1)]), r"sample 1 has shape \(3,\), the first has \(2,\)"),
        (Items([(torch.zeros(3), 0)]), r"client 1 has inputs of shape \(3,\), client 0 of shape \(2,\)"),
        (Items([(torch.tensor([1.0, float("nan")]), 0)]), "client 1 has 1 values that are not finite"),
        (42, "client 1 is a int"),
    ],
)
def test_data_sets_that_do_not_fit_are_one_line(dataset: Any, message: str) -> None:
    with pytest.raises(FedtailError, match=message):
        Federation.from_datasets([TENSORS, dataset], TENSORS)


def test_arrays_with_one_class_or_wrong_names_are_refused() -> None:
    x = np.zeros((3, 2))
    with pytest.raises(FedtailError, match="at least two classes"):
        Federation.from_arrays([(x, [1, 1, 1])], (x, [1, 1, 1]))
    with pytest.raises(FedtailError, match="2 site names for 1 clients"):
        Federation.from_arrays([(x, [0, 1, 0])], (x, [0, 1, 0]), sites=["a", "b"])
    with pytest.raises(FedtailError, match="the test set has inputs of shape"):
        Federation.from_arrays([(x, [0, 1, 0])], (np.zeros((1, 5)), [0]))
