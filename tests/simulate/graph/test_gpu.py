"""Recorded CUDA graphs give what the reference gives on the CPU, for every method. Needs a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.core.records import Task
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.models.classifiers import with_classifier
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator
from fedtail.study.cells import run_cell, run_cells, seeds_of, together
from tests.simulate.graph.test_simulator import (
    Forgetful,
    assert_masks_follow_from_round_client_and_step,
    images,
    round_task,
    sequences,
    small_cnn,
)
from tests.simulate.graph.test_stacked import engines, mlp, table
from tests.study.test_together import config, contents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_recorded_rounds_equal_the_reference(name: str) -> None:
    method, federation = METHODS.build(name), images()
    settings = Settings.of(batch_size=8, seed=3)
    on_gpu = Settings.of(batch_size=8, seed=3, device="cuda", precision="fp32", compile="off")
    one, two = (with_classifier(small_cnn(), method.traits.classifier) for _ in range(2))
    reference = ReferenceSimulator(federation, one, method, settings)
    fast = GraphSimulator(federation, two, method, on_gpu)
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


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize(("fused", "kernels"), [(True, "library"), (True, "own"), (False, "library")])
def test_recorded_dropout_masks_follow_from_seed_round_client_and_step(fused: bool, kernels: str, compile: str) -> None:
    torch.manual_seed(0)
    module, method = Forgetful(), METHODS.build("fedcgnm")
    settings = Settings.of(batch_size=8, device="cuda", kernels=kernels, compile=compile)

    def engine(lanes: int) -> GraphSimulator:
        return GraphSimulator(images(), copy.deepcopy(module), method, settings, fused=fused, lanes=lanes)

    assert_masks_follow_from_round_client_and_step(engine)


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "fedprox", "climb"])
def test_small_models_in_one_recorded_stack_equal_the_reference(name: str) -> None:
    reference, _ = engines(name, table(), mlp)
    _, fast = engines(name, table(), mlp, device="cuda")
    task, _ = round_task(reference.method, reference.model.vector.clone(), reference)
    for _ in range(2):
        expected, got = reference.train(task)[0], fast.train(task)[0]
        for a, b in zip(expected, got, strict=True):
            scale = max(float(a.delta.abs().max()), 0.01)
            assert float((a.delta - b.delta.cpu()).abs().max()) <= 1e-3 * scale
            np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)
        for engine in (reference, fast):
            engine.commit({u.client: 1 for u in expected})
    assert fast.info()["recorded_passes"] > 0


def test_runs_that_share_the_gpu_have_the_bits_they_have_alone(tmp_path: Path) -> None:
    cells = [
        *seeds_of(config("engine.device=cuda", "rates.name=fedhoo"), "graph", range(3)),
        *seeds_of(config("engine.device=cuda", "engine.path=batched", "model.name=mlp"), "stack", range(2)),
    ]
    for cell, outcome in zip(cells, run_cells(cells, tmp_path / "together", launcher=together(3)), strict=True):
        kept = contents(outcome)
        assert kept == contents(run_cell(cell, tmp_path / "alone"))


def test_recorded_lstm_layers_equal_the_reference() -> None:
    method, federation = METHODS.build("fedcgnm"), sequences()
    on_gpu = Settings.of(batch_size=8, device="cuda", precision="fp32", compile="off")
    one, two = (build_model("cnn_lstm", (16,), 3, channels=(4, 8), hidden=16) for _ in range(2))
    reference = ReferenceSimulator(federation, one, method, Settings.of(batch_size=8))
    fast = GraphSimulator(federation, two, method, on_gpu)
    task = Task(0, reference.model.vector.clone(), (0, 1), {"rate": np.full((2, 1), 0.5)}, 0.1)
    for a, b in zip(reference.train(task)[0], fast.train(task)[0], strict=True):
        assert float((a.delta - b.delta).abs().max()) <= 1e-3 * float(a.delta.abs().max())


def test_a_cnn_lstm_in_one_recorded_stack_equals_the_reference() -> None:
    method, federation = METHODS.build("fedcgnm"), sequences()
    on_gpu = Settings.of(batch_size=8, device="cuda", precision="fp32")
    one, two = (build_model("cnn_lstm", (16,), 3, channels=(4, 8), hidden=16) for _ in range(2))
    reference = ReferenceSimulator(federation, one, method, Settings.of(batch_size=8))
    fast = simulator(federation, two, method, on_gpu)
    assert fast.info()["path"] == "batched"
    task = Task(0, reference.model.vector.clone(), (0, 1), {"rate": np.full((2, 1), 0.5)}, 0.1)
    for a, b in zip(reference.train(task)[0], fast.train(task)[0], strict=True):
        assert float((a.delta - b.delta.cpu()).abs().max()) <= 1e-3 * float(a.delta.abs().max())


def test_rounds_by_our_kernels_are_those_of_the_libraries() -> None:
    method, federation = METHODS.build("fedcgnm"), images()
    deltas = []
    for kind in ("library", "own"):
        torch.manual_seed(0)
        module = build_model("resnet18", (3, 8, 8), 4)
        engine = GraphSimulator(federation, module, method, Settings.of(batch_size=64, device="cuda", kernels=kind))
        task, _ = round_task(method, engine.model.vector.clone(), engine)
        deltas.append(torch.stack([u.delta[0] for u in engine.train(task)[0]]))
        assert engine.info()["kernels"] == (kind != "library")
    assert float((deltas[0] - deltas[1]).norm() / deltas[0].norm()) < 0.1  # one step: rounding in bfloat16
