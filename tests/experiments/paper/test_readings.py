"""The readings of the paper that are methods of one's own (benchmarks/readings.py), by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedtail.methods.base import LocalStep

PATH = Path(__file__).parents[3] / "benchmarks" / "readings.py"


@pytest.fixture(scope="module")
def readings() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("readings", PATH)
    assert spec is not None and spec.loader is not None
    sys.modules["readings"] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["readings"]


def test_decay_inside_is_normalized_with_the_gradient(readings: ModuleType) -> None:
    method = readings.DecayInside(beta=0.0, delta=0.0, weight_decay=0.6)
    x, grads = torch.tensor([10.0, 0.0]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    state = {"momentum": torch.zeros(2, 2)}
    direction, _ = method.direction(LocalStep(grads, x, x, {}, state, method.hyper()))
    moved = direction + method.weight_decay * x  # as engines do
    # group 1 has (3, 4) / 5, group 2 the decay alone, (3, 0) / 3
    torch.testing.assert_close(moved, torch.tensor([0.6 + 1.0, 0.8]))
    assert not method.traits.group_momentum and not method.traits.averaged  # no engine takes its own kernel for it


def test_every_tensor_has_a_norm_of_its_own(readings: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "tensor_sizes", lambda _: [2, 1])
    method = readings.NormPerTensor(beta=0.0, delta=0.0)
    grads = torch.tensor([[3.0, 4.0, 0.5], [6.0, 8.0, -0.1]])
    state = {"momentum": torch.zeros(2, 3)}
    direction, _ = method.direction(LocalStep(grads, torch.zeros(3), torch.zeros(3), {}, state, method.hyper()))
    torch.testing.assert_close(direction, torch.tensor([1.2, 1.6, 0.0]))


def test_tensors_of_the_papers_network_are_known(readings: ModuleType) -> None:
    assert sum(readings.tensor_sizes(11_173_962)) == 11_173_962
    with pytest.raises(SystemExit, match="7 parameters"):
        readings.tensor_sizes(7)
