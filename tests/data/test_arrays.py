"""``Federation.from_arrays`` and ``from_datasets``: what they accept, and mistakes named by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedtail.data import Federation
from fedtail.errors import FedtailError

X = np.arange(40.0).reshape(20, 2)
Y = np.array([0, 1, 2, 1] * 5)


def test_numpy_tensors_frames_and_lists_give_the_same_federation() -> None:
    made = [
        Federation.from_arrays([(x, y), (x, y)], (x, y))
        for x, y in [
            (X, Y),
            (torch.as_tensor(X), torch.as_tensor(Y)),
            (X.tolist(), Y.tolist()),
            (pd.DataFrame(X), pd.Series(Y)),
            (X.astype(np.float32), Y.astype(float)),
            (X.astype(np.int32), Y[:, None]),
        ]
    ]
    for federation in made[1:]:
        assert torch.equal(federation.pool.x, made[0].pool.x) and torch.equal(federation.pool.y, made[0].pool.y)
        assert federation.classes == ("0", "1", "2")
    assert made[0].pool.x.dtype == torch.float32


def test_images_of_bytes_stay_bytes() -> None:
    x = np.zeros((20, 1, 4, 4), dtype=np.uint8)
    assert Federation.from_arrays([(x, Y)], (x, Y)).pool.x.dtype == torch.uint8


def test_images_given_channels_last_are_stored_as_models_expect_them() -> None:
    x = torch.rand(20, 4, 4, 3).permute(0, 3, 1, 2)
    assert Federation.from_arrays([(x, Y)], (x.numpy(), Y)).pool.x.is_contiguous()
    assert Federation.from_arrays([(x, Y)], (x.numpy(), Y)).test.x.is_contiguous()


def test_labels_may_be_names_or_positions_of_the_given_classes() -> None:
    classes = ["none", "crack", "void"]
    names = np.array(classes)[Y]
    by_name = Federation.from_arrays([(X, names)], (X, names), classes=classes)
    by_position = Federation.from_arrays([(X, Y)], (X, Y), classes=classes)
    assert torch.equal(by_name.pool.y, by_position.pool.y) and by_name.classes == ("none", "crack", "void")


def test_without_a_test_set_each_client_gives_up_a_stratified_share() -> None:
    federation = Federation.from_arrays([(X, Y), (X, Y)], test_fraction=0.4, validation=0.0)
    assert len(federation.test) == 16 and federation.sizes.tolist() == [12, 12]
    assert federation.test.counts(3).tolist() == [4, 8, 4]


@pytest.mark.parametrize(
    ("clients", "options", "words"),
    [
        ([], {}, "one .x, y. pair per client"),
        ([X], {}, "client 0 is a ndarray, not an"),
        ([(X, Y), (X[:, :1], Y)], {}, r"client 1 has inputs of shape \(1,\), client 0 of shape \(2,\)"),
        ([(X, Y), (X[:0], Y[:0])], {"sites": ["a", "b"]}, r"client 1 \('b'\) has no samples"),
        ([(X, Y[:5])], {}, "20 inputs but 5 labels"),
        ([(X, np.eye(3)[Y])], {}, "use y.argmax"),
        ([(X, Y + 0.5)], {}, "fractions or not finite"),
        ([(np.where(X == 6, np.nan, X), Y)], {}, r"has 1 values that are not finite \(first in row 3\)"),
        ([(X.astype(str), Y)], {}, "table_from_frame"),
        ([(X[:, 0], Y)], {}, r"x\[:, None\]"),
        ([(X, Y), (X, Y)], {"sites": ["a"]}, "1 site names for 2 clients"),
        ([(X, Y), (X, Y)], {"sites": ["a", "a"]}, "must be different"),
        ([(X, Y)], {"classes": ["a", "b"]}, "labels must be 0..1, got 0..2"),
        ([(X, Y.astype(str))], {"classes": ["a", "b"]}, "label '0' is not among"),
        ([(X, Y)], {"classes": ["a", "a", "b"]}, "two or more different"),
        ([(X, np.zeros(20))], {}, "only one class"),
        ([(X, Y)], {"test": (X[:, :1], Y)}, "the test set has inputs of shape"),
        ([(X, Y)], {"test": (X, Y + 7)}, "do not occur at any client"),
    ],
)
def test_mistakes_are_one_clear_line(clients: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FedtailError, match=words) as caught:
        Federation.from_arrays(clients, **options)
    assert "\n" not in str(caught.value)


def test_data_sets_without_a_test_set_give_one_up_too() -> None:
    even = [(np.zeros(2), i % 2) for i in range(10)]
    federation = Federation.from_datasets([even, even])
    assert federation.n_clients == 2 and len(federation.test) == 4
