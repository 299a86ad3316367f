"""Measurements of sites: what honest ones say is taken as it is, what cannot be is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedtail.core.features import class_gradients, class_moments, effective_numbers
from fedtail.federate.protocol.limits import WireError
from fedtail.federate.protocol.wire import Parcel
from fedtail.federate.replies import read_measurement

N, D, C = 40, 5, 4
FEATURES = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % (C - 1)  # the last class is missing
HONEST = {
    "train_loss": torch.tensor(0.7),
    "class_loss": torch.tensor([0.1, 2.0, 0.5, float("nan")]),
    "class_moments": class_moments(FEATURES, LABELS, C).packed(),
    "class_gradients": class_gradients(FEATURES, FEATURES[:, :C], LABELS, C),
    "effective_numbers": effective_numbers(FEATURES, LABELS, C),
}


def with_value(value: Tensor, place: tuple[int, ...], number: float) -> Tensor:
    value = value.clone()
    value[place] = number
    return value


LIES = [
    ("train_loss", (), float("inf")),
    ("train_loss", (), -1.0),
    ("class_loss", (0,), float("inf")),
    ("class_moments", (0, 0), 1e9),
    ("class_moments", (0, 0), 13.5),
    ("class_moments", (0, 1), float("nan")),
    ("class_moments", (0, 1 + D), -1.0),
    ("class_gradients", (0, 0, D), 50.0),
    ("class_gradients", (1, 0, 0), float("inf")),
    ("effective_numbers", (0,), 1e6),
    ("effective_numbers", (0,), float("nan")),
]


@pytest.mark.parametrize("what", HONEST)
def test_an_honest_measurement_is_taken_as_it_is(what: str) -> None:
    read = read_measurement(0, Parcel({}, {"value": HONEST[what]}), what, N)
    assert torch.equal(read.nan_to_num(), HONEST[what].nan_to_num())


@pytest.mark.parametrize(("what", "place", "number"), LIES)
def test_a_measurement_that_cannot_be_is_refused(what: str, place: tuple[int, ...], number: float) -> None:
    with pytest.raises(WireError, match=what) as error:
        read_measurement(0, Parcel({}, {"value": with_value(HONEST[what], place, number)}), what, N)
    assert error.value.code == "out-of-range"
