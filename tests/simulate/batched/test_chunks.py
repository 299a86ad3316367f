"""Convolutional models in chunks: the reference path's gradients, and the same bits whoever computes a chunk.

Every method is held to the reference path in ``test_simulator`` (the kind "images").
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.reference import ReferenceSimulator
from tests.simulate.batched.test_simulator import assert_same_round, make_federation, make_module, make_task


class Coupled(nn.Module):
    """Images influence each other, which no look at its layers tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_module("images")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x - x.mean(0))
        return out


def test_images_run_in_chunks_where_each_stands_alone() -> None:
    method, federation = METHODS.build("fedcgnm"), make_federation("images")
    engine = simulator(federation, make_module("images"), method, Settings.of(batch_size=8))
    assert engine.info()["kernel"] == "ChunkedKernel" and "images in chunks" in engine.info()["reason"]
    assert simulator(federation, Coupled(), method, Settings.of(batch_size=8)).info().get("kernel") != "ChunkedKernel"


def test_residual_images_equal_the_reference_for_some_of_the_clients() -> None:
    method, federation = METHODS.build("fedcgnm", n_groups=3, weight_decay=1e-2), make_federation("images")
    modules = [build_model("resnet18", (3, 20, 20), 4, width=4, norm_groups=2) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    settings = Settings.of(batch_size=16)
    reference = ReferenceSimulator(federation, modules[0], method, settings)
    fast = BatchedSimulator(federation, modules[1], method, settings)
    assert isinstance(fast.kernel, ChunkedKernel)
    assert_same_round(reference, fast, make_task(method, reference, clients=(1, 3)))


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm"])
def test_the_bits_do_not_depend_on_the_workers(name: str) -> None:
    method, results = METHODS.build(name), []
    for workers in (1, 3):
        settings = Settings.of(batch_size=16, workers=workers)
        engine = BatchedSimulator(make_federation("images"), make_module("images"), method, settings)
        assert isinstance(engine.kernel, ChunkedKernel)
        engine.kernel.chunk = 3
        updates, _ = engine.train(make_task(method, engine))
        results.append(torch.cat([u.delta for u in updates]))
    assert torch.equal(*results)


class Dropping(nn.Module):
    """Flattens by ``view`` and drops by a function; its dense layer is a large one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25))
        self.hidden, self.output = nn.Linear(16 * 100, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.images(x)
        h = torch.relu(self.hidden(h.view(len(h), -1)))
        out: torch.Tensor = self.output(nn.functional.dropout(h, 0.5, self.training))
        return out


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm"])
def test_dropout_draws_what_it_draws_on_the_reference_path(name: str) -> None:
    method, federation = METHODS.build(name, weight_decay=1e-2), make_federation("images")
    reference = ReferenceSimulator(federation, Dropping(), method, Settings.of(batch_size=16, workers=1))
    task = make_task(method, reference)
    task, deltas = replace(task, x=task.x.clone()), list[torch.Tensor]()
    expected = torch.cat([u.delta for u in reference.train(task)[0]])
    for workers in (1, 3):
        fast = simulator(federation, Dropping(), method, Settings.of(batch_size=16, workers=workers))
        assert fast.info()["kernel"] == "ChunkedKernel"
        deltas.append(torch.cat([u.delta for u in fast.train(task)[0]]))
    assert torch.equal(*deltas)
    torch.testing.assert_close(deltas[0], expected, rtol=1e-3, atol=1e-5)
