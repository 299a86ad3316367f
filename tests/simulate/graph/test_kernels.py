"""Kernels for a step's weight gradients and momentum against plain torch; they run under TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from fedtail.core.momentum import cgnm_direction
from fedtail.methods import METHODS
from fedtail.methods.optimizers import with_optimizer
from fedtail.simulate.graph import convolution, momentum
from fedtail.simulate.graph.convolution import NARROW, Shape, halved_inputs, plan_of, weight_gradients
from fedtail.simulate.graph.momentum import momentum_step

interpreted = pytest.mark.skipif(
    convolution.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)


@interpreted
@pytest.mark.parametrize("sizes", [(3, 2), (2, 0), (5,)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "stride"), [(64, 64, 3, 1), (64, 128, 3, 2), (64, 64, 1, 2), (3, 64, 3, 1)]
)
def test_weight_gradients_of_every_group_go_where_they_are_wanted(
    sizes: tuple[int, ...], inputs: int, outputs: int, kernel: int, stride: int
) -> None:
    torch.manual_seed(0)
    pad, size = kernel // 2, inputs * outputs * kernel**2
    x = torch.randn(sum(sizes), inputs, 8, 8).contiguous(memory_format=torch.channels_last)
    w = torch.zeros(outputs, inputs, kernel, kernel)
    dy = torch.randn_like(nn.functional.conv2d(x, w, None, stride, pad)).contiguous(memory_format=torch.channels_last)
    flat = torch.full((len(sizes), size + 7), 9.0)
    places = [row[3 : 3 + size].view(outputs, kernel, kernel, inputs).permute(0, 3, 1, 2) for row in flat]
    given = x if inputs > NARROW else nn.functional.pad(x, (0, 0, 0, 0, 0, NARROW - inputs), value=7.0)
    given = given.contiguous(memory_format=torch.channels_last)
    shape = Shape((given.shape[1], outputs, kernel, kernel, stride, pad, pad), (8, 8, dy.shape[2], dy.shape[3]))
    weight_gradients(given, dy, sizes=sizes, shape=shape, plan=plan_of(shape), places=places)
    for place, x_h, dy_h in zip(places, x.split(sizes), dy.split(sizes), strict=True):
        expected = nn.grad.conv2d_weight(x_h, w.shape, dy_h, stride, pad) if len(x_h) else w
        torch.testing.assert_close(place, expected, rtol=1e-4, atol=1e-4)
    assert (flat[:, :3] == 9).all() and (flat[:, 3 + size :] == 9).all()


@interpreted
@pytest.mark.parametrize(("inputs", "outputs", "kernel"), [(64, 128, 3), (128, 64, 1)])
def test_input_gradients_of_layers_with_stride_2(inputs: int, outputs: int, kernel: int) -> None:
    torch.manual_seed(0)
    pad = kernel // 2
    w = torch.randn(outputs, inputs, kernel, kernel).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(5, outputs, 3, 2).contiguous(memory_format=torch.channels_last)
    dx = halved_inputs(dy, w, Shape((inputs, outputs, kernel, kernel, 2, pad, pad), (6, 4, 3, 2)))
    torch.testing.assert_close(dx, nn.grad.conv2d_input((5, inputs, 6, 4), w, dy, 2, pad), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("beta", "delta"), [(0.5, 0.1), (0.9, 0.0)])
def test_a_momentum_step_in_kernels_is_the_step(groups: int, beta: float, delta: float, monkeypatch) -> None:
    monkeypatch.setattr(momentum, "BLOCK", 64)
    monkeypatch.setattr(momentum, "AT_ONCE", 32)
    torch.manual_seed(0)
    m, g, x = torch.randn(groups, 300), torch.randn(groups, 300), torch.randn(300)
    if groups > 1:
        m[1], g[1] = 0.0, 0.0  # an absent group
    hyper = {k: torch.tensor(v) for k, v in {"beta": beta, "delta": delta, "lr": 0.3, "weight_decay": 0.01}.items()}
    direction, expected = cgnm_direction(m, g, beta, delta)
    moved, shadow = x.clone(), torch.zeros(300, dtype=torch.bfloat16)
    momentum_step(moved, shadow, m, g, hyper)
    torch.testing.assert_close(m, expected)
    torch.testing.assert_close(moved, x - 0.3 * (direction + 0.01 * x))
    torch.testing.assert_close(shadow, moved.to(torch.bfloat16))


def test_only_methods_whose_direction_is_group_momentum_say_so() -> None:
    class Own(type(METHODS.build("fedcgnm"))):
        def direction(self, step):
            return super().direction(step)

    assert METHODS.build("fedcgnm").group_momentum and not METHODS.build("fedavg").group_momentum
    assert not with_optimizer(METHODS.build("fedcgnm"), "adam").group_momentum and not Own.group_momentum
