"""Kernels for a step's weight gradients and momentum against plain torch; they run under TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtail.core.momentum import cgnm_direction
from fedtail.methods import METHODS
from fedtail.methods.optimizers import with_optimizer
from fedtail.settings import Settings
from fedtail.simulate.graph import convolution, fused, grouped, step
from fedtail.simulate.graph.convolution import NARROW, Plan, Shape, plan_of, weight_gradients
from fedtail.simulate.graph.network import Layout, Numerics
from fedtail.simulate.graph.pixels import Tile, halved_inputs, has_halved, same_size
from fedtail.simulate.graph.recorder import SideStreams
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.graph.step import agree, momentum_step
from tests.simulate.graph.test_simulator import images, small_cnn

interpreted = pytest.mark.skipif(
    convolution.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)


@interpreted
@pytest.mark.parametrize("sizes", [(3, 2), (2, 0), (5,)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "stride", "across"),
    [(64, 64, 3, 1, False), (64, 64, 3, 1, True), (64, 128, 3, 2, True), (64, 64, 1, 2, False), (3, 64, 3, 1, False)],
)
def test_weight_gradients_of_every_group_go_where_they_are_wanted(
    sizes: tuple[int, ...], inputs: int, outputs: int, kernel: int, stride: int, across: bool
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
    plan = replace(plan_of(shape) or Plan(64, 64), across=across)
    weight_gradients(given, dy, sizes=sizes, shape=shape, plan=plan, places=places)
    for place, x_h, dy_h in zip(places, x.split(sizes), dy.split(sizes), strict=True):
        expected = nn.grad.conv2d_weight(x_h, w.shape, dy_h, stride, pad) if len(x_h) else w
        torch.testing.assert_close(place, expected, rtol=1e-4, atol=1e-4)
    assert (flat[:, :3] == 9).all() and (flat[:, 3 + size :] == 9).all()


@interpreted
def test_layers_that_keep_the_size_of_images_both_ways() -> None:
    torch.manual_seed(0)
    w, x, dy = torch.randn(32, 64, 3, 3), torch.randn(3, 64, 5, 6), torch.randn(3, 32, 5, 6)
    x, w, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, w, dy))
    y, dx = same_size(x, w, Tile(64, 32, 32), back=False), same_size(dy, w, Tile(64, 32, 16), back=True)
    torch.testing.assert_close(y, nn.functional.conv2d(x, w, None, 1, 1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(dx, nn.grad.conv2d_input(x.shape, w, dy, 1, 1), rtol=1e-4, atol=1e-3)


@interpreted
def test_input_gradients_of_a_layer_with_stride_2() -> None:
    torch.manual_seed(0)
    w, dy = torch.randn(128, 64, 3, 3), torch.randn(3, 128, 4, 6)
    shape = Shape((64, 128, 3, 3, 2, 1, 1), (8, 12, 4, 6))
    assert has_halved(shape) and not has_halved(Shape((64, 128, 3, 3, 2, 1, 1), (7, 12, 4, 6)))
    given = (t.contiguous(memory_format=torch.channels_last) for t in (dy, w))
    expected = nn.grad.conv2d_input((3, 64, 8, 12), w, dy, 2, 1)
    torch.testing.assert_close(halved_inputs(*given, shape), expected, rtol=1e-4, atol=1e-3)


@interpreted
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("beta", "delta"), [(0.5, 0.1), (0.9, 0.0)])
def test_a_momentum_step_in_kernels_is_the_step(groups: int, beta: float, delta: float, monkeypatch) -> None:
    monkeypatch.setattr(step, "BLOCK", 64)
    monkeypatch.setattr(step, "AT_ONCE", 32)
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

    assert METHODS.build("fedcgnm").traits.group_momentum and not METHODS.build("fedavg").traits.group_momentum
    assert not with_optimizer(METHODS.build("fedcgnm"), "adam").traits.group_momentum and not Own.traits.group_momentum


@interpreted
def test_a_network_takes_its_weight_gradients_from_the_kernel_in_their_place(monkeypatch) -> None:
    def any_shape(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> Shape:
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, dy))
        return Shape((64, 64, 3, 3, 1, 1, 1), (*x.shape[2:], *dy.shape[2:]))

    monkeypatch.setattr(grouped, "kernel_shape", any_shape)
    torch.manual_seed(0)
    one, two = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
    module = nn.Sequential(one, nn.ReLU(), two)
    layout = Layout(module, Numerics.choose(module, torch.device("cpu")))
    own = layout.inward(torch.cat([p.detach().flatten() for p in module.parameters()]))
    sizes, side = (3, 2), SideStreams()
    side.kernels = True
    flat = torch.full((2, layout.n_params), 9.0)
    side.places = [layout.named(row) for row in flat]
    weights = [{n: w.detach().requires_grad_() for n, w in layout.named(own).items()} for _ in sizes]
    x = torch.randn(5, 64, 4, 4).contiguous(memory_format=torch.channels_last)
    out = fused.fused_network(module, side)(weights, x, sizes)
    grads = torch.autograd.grad(out.square().sum(), [w for group in weights for w in group.values()])
    places = [place for group in side.places for place in group.values()]
    assert all(g.data_ptr() == p.data_ptr() for g, p in zip(grads, places, strict=True))
    for h, rows in enumerate(x.split(sizes)):
        expected = torch.autograd.grad(module(rows).square().sum(), list(module.parameters()))
        for mine, theirs in zip(grads[2 * h : 2 * h + 2], expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_kernels_that_fail_or_are_wrong_are_left_to_the_libraries() -> None:
    def step(wrong: float | None) -> Callable[[bool], torch.Tensor]:
        def run(kernels: bool) -> torch.Tensor:
            if kernels and wrong is None:
                raise RuntimeError("out of resource: shared memory")
            return torch.ones(2, 3) * (1 + (wrong or 0.0) * kernels)

        return run

    assert agree(step(0.01))
    for wrong, said in ((None, "shared memory"), (0.5, "differ by"), (float("nan"), "differ by")):
        with pytest.warns(UserWarning, match=said):
            assert not agree(step(wrong))


def test_the_step_that_kernels_are_tried_with_moves_and_knows_a_wrong_one(monkeypatch) -> None:
    """Without a GPU both ways are the library's, until one is broken."""
    engine = GraphSimulator(images(), small_cnn(), METHODS.build("fedcgnm"), Settings.of(batch_size=8))
    rows = engine._trial_step(False)
    assert rows.shape[0] == 5 and bool((rows.norm(dim=1) > 0).all())
    assert agree(engine._trial_step)
    monkeypatch.setattr(step, "has_kernel", lambda *_: True)
    monkeypatch.setattr(step, "momentum_step", lambda params, *_: params.zero_())
    with pytest.warns(UserWarning, match="left to the libraries"):
        assert not agree(engine._trial_step)


def test_momentum_of_natural_length_has_no_kernel() -> None:
    assert step.normalizes_momentum(METHODS.build("fedcgnm"))
    assert not step.normalizes_momentum(METHODS.build("fedcgnm", length="natural"))
