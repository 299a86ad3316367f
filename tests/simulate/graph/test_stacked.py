"""All clients of a round in one stack of small models, as on a GPU but called instead of recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedtail.data.federation import Federation
from fedtail.methods import METHODS
from fedtail.models.classifiers import with_classifier
from fedtail.settings import Settings
from fedtail.simulate.graph.stacked import StackedSimulator
from fedtail.simulate.reference import ReferenceSimulator
from tests.simulate.graph.test_simulator import assert_same_round, images, round_task


def table() -> Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 4) for n in (70, 22, 9, 33)]
    return Federation.from_arrays(data, data[1], classes=list("abcd"), validation=0.2)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 4))


def engines(name: str, federation: Federation, module, **settings):
    method, chosen = METHODS.build(name), Settings.of(batch_size=8, seed=3, **settings)
    one, two = (with_classifier(module(), method.traits.classifier) for _ in range(2))
    return ReferenceSimulator(federation, one, method, chosen), StackedSimulator(federation, two, method, chosen)


@pytest.mark.parametrize("name", sorted(n for n in METHODS if n not in ("fedgrab", "fednoro", "fedrela")))
def test_two_rounds_of_a_stack_equal_the_reference_for_every_method(name: str) -> None:
    reference, fast = engines(name, table(), mlp)
    task, _ = round_task(reference.method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)
    assert_same_round(reference, fast, task)


def test_images_with_crops_equal_the_reference() -> None:
    flat = lambda: (torch.manual_seed(0), nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))[1]  # noqa: E731
    reference, fast = engines("fedcgnm", images(), flat, epochs=2)
    task, _ = round_task(reference.method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)
