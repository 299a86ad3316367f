"""Recorded CUDA graphs give what the reference gives on the CPU, for every method. Needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtail.methods import METHODS
from fedtail.models.classifiers import with_classifier
from fedtail.settings import Settings
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator
from tests.simulate.graph.test_simulator import images, round_task, small_cnn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_recorded_rounds_equal_the_reference(name: str) -> None:
    method, federation = METHODS.build(name), images()
    settings = Settings.of(batch_size=8, seed=3)
    on_gpu = Settings.of(batch_size=8, seed=3, device="cuda", precision="fp32", compile="off")
    one, two = (with_classifier(small_cnn(), method.classifier) for _ in range(2))
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
