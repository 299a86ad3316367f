"""Hand-written layers give what autograd gives on the module they were recognised from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedtail.models.registry import with_classifier
from fedtail.simulate.batched.layers import Window
from fedtail.simulate.batched.network import recognise

MODELS, SAMPLES, INPUTS, CLASSES = 2, 7, 5, 4


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, CLASSES))


@pytest.mark.parametrize("kind", ["linear", "etf", "sparse_etf"])
def test_a_network_with_any_classifier_equals_its_module(kind: str) -> None:
    torch.manual_seed(0)
    module = with_classifier(plain(), kind)
    network = recognise(module, (INPUTS,))
    assert network is not None
    names = [name for name, _ in module.named_parameters()]
    flat = torch.stack([torch.cat([p.detach().flatten() for p in module.parameters()])] * MODELS)
    flat += 0.3 * torch.randn_like(flat)
    x = torch.randn(MODELS, SAMPLES, INPUTS)
    logits, saved = network.forward(flat, x)
    signal = torch.randn_like(logits)
    gradient = torch.empty(MODELS, 1, flat.shape[1])
    network.backward(saved, signal, [Window(0, SAMPLES, None)], None, gradient, 0.0)
    for k in range(MODELS):
        parts = flat[k].split([p.numel() for p in module.parameters()])
        shaped = {n: v.view_as(p).requires_grad_() for n, v, p in zip(names, parts, module.parameters(), strict=True)}
        expected = functional_call(module.train(), shaped, x[k])
        torch.testing.assert_close(logits[k].T, expected)
        grads = torch.autograd.grad((expected * signal[k].T).sum(), list(shaped.values()))
        torch.testing.assert_close(gradient[k, 0], torch.cat([g.flatten() for g in grads]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(network.answers(flat, x)[k].T, functional_call(module.eval(), shaped, x[k]))


def test_a_norm_without_an_offset_is_not_taken_for_one_with() -> None:
    """As torch's ``GroupNorm(bias=False)`` makes it; such models ran on the reference path, after an obscure error."""
    norm = nn.GroupNorm(2, 6)
    norm.register_parameter("bias", None)
    assert recognise(nn.Sequential(nn.Linear(INPUTS, 6), norm, nn.Linear(6, CLASSES)), (INPUTS,)) is None
