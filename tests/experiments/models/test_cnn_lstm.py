"""The CNN-LSTM of many clients at once: layers against autograd, and rounds against the reference path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.batched.layers import Window
from fedtail.simulate.batched.network import recognise
from fedtail.simulate.reference import ReferenceSimulator
from tests.simulate.graph.test_simulator import assert_same_round, round_task, sequences


@pytest.mark.parametrize(
    ("shape", "channels", "hidden"),
    [((21,), (4, 8), 5), ((6, 16), (4,), 3), ((8,), (4, 8, 6), 4)],
    ids=["odd", "channels", "one step"],
)
def test_group_gradients_of_many_models_equal_autograd(
    shape: tuple[int, ...], channels: tuple[int, ...], hidden: int
) -> None:
    torch.manual_seed(0)
    modules = [build_model("cnn_lstm", shape, 3, channels=channels, hidden=hidden).double() for _ in range(2)]
    network = recognise(modules[0], shape)
    assert network is not None
    x = torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in modules])
    inputs, masks = torch.randn(2, 7, *shape).double(), torch.rand(2, 2, 7).double()
    logits, saved = network.forward(x, inputs)
    d, into = torch.randn_like(logits), torch.full((2, 2, x.shape[1]), 0.5).double()
    masks[:, 0, 5:] = 0.0
    windows = [Window(0, 5, masks[:, :1, :5]), Window(0, 7, masks[:, 1:])]
    network.backward(saved, d, windows, masks, into, 2.0)
    for k, module in enumerate(modules):
        out = module(inputs[k]).T
        torch.testing.assert_close(logits[k], out.detach())
        for h in range(2):
            grads = torch.autograd.grad((out * d[k] * masks[k, h]).sum(), list(module.parameters()), retain_graph=True)
            torch.testing.assert_close(into[k, h], 1.0 + torch.cat([g.flatten() for g in grads]))


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "focal"])
def test_rounds_of_a_cnn_lstm_equal_the_reference(name: str) -> None:
    method, federation = METHODS.build(name), sequences()
    module = build_model("cnn_lstm", (16,), 3, channels=(4, 8), hidden=5)
    settings = Settings.of(batch_size=8)
    reference = ReferenceSimulator(federation, copy.deepcopy(module), method, settings)
    fast = simulator(federation, copy.deepcopy(module), method, settings)
    assert fast.info()["path"] == "batched"
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    for _ in range(2):
        assert_same_round(reference, fast, task)
    assert not fast.info().get("fallbacks")
