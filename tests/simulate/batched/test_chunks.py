"""Convolutional models in chunks: the reference path's gradients, and the same bits whoever computes a chunk.

Every method is held to the reference path in ``test_simulator`` (the kind "images").
"""

from __future__ import annotations

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
