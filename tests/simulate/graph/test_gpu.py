"""Recorded CUDA graphs give what the reference gives on the CPU, for every method. Needs a GPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fedtail.core.records import Task
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.models.registry import with_classifier
from fedtail.settings import Settings
from fedtail.simulate.graph import pixels
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator
from tests.simulate.graph.test_simulator import (
    Forgetful,
    assert_masks_follow_from_round_client_and_step,
    images,
    round_task,
    sequences,
    small_cnn,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_recorded_rounds_equal_the_reference(name: str) -> None:
    method, federation = METHODS.build(name), images()
    settings = Settings.of(batch_size=8, seed=3)
    on_gpu = Settings.of(batch_size=8, seed=3, device="cuda", precision="fp32")
    one, two = (with_classifier(small_cnn(), method.traits.classifier) for _ in range(2))
    reference = ReferenceSimulator(federation, one, method, settings)
    fast = GraphSimulator(federation, two, method, on_gpu, compile=False)
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    for _ in range(2):
        expected, got = reference.train(task)[0], fast.train(task)[0]
        for a, b in zip(expected, got, strict=True):
            scale = max(float(a.delta.abs().max()), 0.01)
            assert float((a.delta - b.delta).abs().max()) <= 1e-3 * scale
            np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)
        for engine in (reference, fast):
            engine.commit({u.client: 1 for u in expected})
    assert np.array_equal(reference.confusion(task.x, "test"), fast.confusion(task.x, "test"))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("fused", "kernels"), [(True, False), (True, True), (False, False)])
def test_recorded_dropout_masks_follow_from_seed_client_and_step(fused: bool, kernels: bool, compile: bool) -> None:
    torch.manual_seed(0)
    module, method = Forgetful(), METHODS.build("fedcgnm")
    settings = Settings.of(batch_size=8, device="cuda")

    def engine(lanes: int) -> GraphSimulator:
        own = copy.deepcopy(module)
        return GraphSimulator(
            images(), own, method, settings, fused=fused, lanes=lanes, kernels=kernels, compile=compile
        )

    assert_masks_follow_from_round_client_and_step(engine)


def test_recorded_lstm_layers_equal_the_reference() -> None:
    method, federation = METHODS.build("fedcgnm"), sequences()
    on_gpu = Settings.of(batch_size=8, device="cuda", precision="fp32")
    one, two = (build_model("cnn_lstm", (16,), 3, channels=(4, 8), hidden=16) for _ in range(2))
    reference = ReferenceSimulator(federation, one, method, Settings.of(batch_size=8))
    fast = GraphSimulator(federation, two, method, on_gpu, compile=False)
    task = Task(0, reference.model.vector.clone(), (0, 1), {"rate": np.full((2, 1), 0.5)}, 0.1)
    for a, b in zip(reference.train(task)[0], fast.train(task)[0], strict=True):
        assert float((a.delta - b.delta).abs().max()) <= 1e-3 * float(a.delta.abs().max())


def test_rounds_by_our_kernels_are_those_of_the_libraries() -> None:
    method, federation = METHODS.build("fedcgnm"), images()
    deltas = []
    for kernels in (False, True):
        torch.manual_seed(0)
        module = build_model("resnet18", (3, 8, 8), 4)
        engine = GraphSimulator(federation, module, method, Settings.of(batch_size=64, device="cuda"), kernels=kernels)
        task, _ = round_task(method, engine.model.vector.clone(), engine)
        deltas.append(torch.stack([u.delta[0] for u in engine.train(task)[0]]))
        assert engine.info()["kernels"] == kernels
    assert float((deltas[0] - deltas[1]).norm() / deltas[0].norm()) < 0.1  # one step: rounding in bfloat16


def test_large_batches_leave_3x3_layers_to_the_library() -> None:
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.zeros(pixels.MOST_IMAGES + 1, 64, 4, 4, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    assert pixels.same_tile("forward", layer, x[:-1]) is not None
    assert pixels.same_tile("forward", layer, x) is None
