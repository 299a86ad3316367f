"""The fused GroupNorm equals PyTorch's GroupNorm, addition and ReLU, forwards and backwards."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

from fedtail.simulate.graph import groupnorm
from fedtail.simulate.graph.groupnorm import norm_backward, norm_forward, norm_gradients

INTERPRETED = groupnorm.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("channels", "groups", "side", "read"),
    [(64, 32, 9, "twice"), (128, 2, 4, "halved"), (8, 8, 3, "once"), (4, 1, 96, "halved")],
)
def test_both_directions_equal_autograd_and_weights_get_one_gradient_per_group_of_rows(
    kernel: bool, relu: bool, added: bool, channels: int, groups: int, side: int, read: str
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n, sizes = 6, (4, 2)
    x, r, dy = (draw(n, channels, side, side).contiguous(memory_format=torch.channels_last) for _ in range(3))
    w, b = draw(channels) + 1, draw(channels)
    more = None if read == "once" else draw(*dy.shape).contiguous(memory_format=torch.channels_last)
    saved, half = norm_forward(
        x, r if added else None, w, b, groups, 1e-5, relu=relu, kernel=kernel, halved=read == "halved"
    )
    if more is not None and half is not None:
        assert torch.equal(half, saved.y[:, :, ::2, ::2])
        more = more[:, :, ::2, ::2].contiguous(memory_format=torch.channels_last)
    dx, dz, sums = norm_backward(dy, saved, relu=relu, residual=added, kernel=kernel, more=more)
    grads = norm_gradients(sums, sizes, w.dtype, kernel)
    if more is not None:
        dy = dy.clone()
        (dy if half is None else dy[:, :, ::2, ::2]).add_(more)

    leaves = [t.clone().requires_grad_() for t in (x, r, w, b)]
    z = F.group_norm(leaves[0], groups, leaves[2], leaves[3], 1e-5) + (leaves[1] if added else 0.0)
    expected = F.relu(z) if relu else z
    torch.testing.assert_close(saved.y, expected.detach(), rtol=1e-4, atol=1e-5)
    per_row = [torch.autograd.grad(expected, leaves, torch.where(_rows(n, part), dy, 0.0), retain_graph=True,
                                   allow_unused=True) for part in (range(4), range(4, 6))]  # fmt: skip
    torch.testing.assert_close(dx, per_row[0][0] + per_row[1][0], rtol=1e-3, atol=1e-4)
    for h, parts in enumerate(per_row):
        torch.testing.assert_close(grads[h], torch.stack(parts[2:]), rtol=1e-3, atol=1e-3)
    if added:
        torch.testing.assert_close(dz, per_row[0][1] + per_row[1][1], rtol=1e-4, atol=1e-5)
    else:
        assert dz is None


def _rows(n: int, part: range) -> torch.Tensor:
    mask = torch.zeros(n, dtype=torch.bool)
    mask[list(part)] = True
    return mask.view(n, 1, 1, 1)
