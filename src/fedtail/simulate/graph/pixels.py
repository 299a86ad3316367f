"""Outputs and input gradients of the 3x3 convolutions of a ResNet, where a kernel of ours is ahead of the library's.

A program takes a tile of pixels and channels. With stride 1 outputs and input gradients are the same sum over nine
positions, with the filter turned round; with stride 2 an input pixel is reached from those output pixels alone whose
parity fits, so that the four kinds of input pixels are four sums without a zero in them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtail.simulate.graph.convolution import Shape

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None


if triton is not None:

    @triton.jit(do_not_specialize=["samples"])
    def _halved_kernel(  # type: ignore[no-untyped-def]
        dy, w, dx, samples, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr,
        PAD_W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """dx (N, HI, WI, CI) of a layer with stride 2. Third index: the quarter of the pixels; odd rows and columns,
        which have the longest sums, come first."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        quarter = 3 - tl.program_id(2)
        odd_row = quarter // 2
        odd_column = quarter % 2
        n = m // (HI // 2 * (WI // 2))
        u = m // (WI // 2) % (HI // 2)
        v = m % (WI // 2)
        ok = n < samples
        first_row = (odd_row + PAD_H) % 2
        first_column = (odd_column + PAD_W) % 2
        columns = (KW - first_column + 1) // 2
        taps = (KH - first_row + 1) // 2 * columns
        total = tl.zeros([BM, BN], tl.float32)
        for t in range(0, taps * (CO // BK)):  # noqa: PIE808
            tap = t // (CO // BK)
            k = t % (CO // BK) * BK + tl.arange(0, BK)
            r = first_row + tap // columns * 2
            s = first_column + tap % columns * 2
            row = u + ((odd_row + PAD_H - r) >> 1)
            column = v + ((odd_column + PAD_W - s) >> 1)
            inside = ok & (row >= 0) & (row < HO) & (column >= 0) & (column < WO)
            d = tl.load(dy + ((n * HO + row) * WO + column)[:, None] * CO + k[None, :], mask=inside[:, None], other=0.0)
            f = tl.load(w + (k[:, None] * (KH * KW) + r * KW + s) * CI + c[None, :])
            total = tl.dot(d, f, total)
        at = ((n * HI + u * 2 + odd_row) * WI + v * 2 + odd_column)[:, None] * CI + c[None, :]
        tl.store(dx + at, total, mask=ok[:, None])

    @triton.jit(do_not_specialize=["pixels"])
    def _same_kernel(  # type: ignore[no-untyped-def]
        a, w, out, pixels, H: tl.constexpr, W: tl.constexpr, CK: tl.constexpr, CN: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, BACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        BK: tl.constexpr,
    ):  # fmt: skip
        """out (pixels, CN) of a layer with stride 1 that keeps the size of images a (pixels, CK): its outputs, or BACK
        its input gradients. The filter's positions come one after the other, so that what they read is near."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        u = m // W % H
        v = m % W
        total = tl.zeros([BM, BN], tl.float32)
        for t in range(0, KH * KW * (CK // BK)):  # noqa: PIE808
            tap = t % (KH * KW)
            k = t // (KH * KW) * BK + tl.arange(0, BK)
            down = tap // KW - KH // 2
            right = tap % KW - KW // 2
            if BACK:
                down = -down
                right = -right
            inside = (m < pixels) & (u + down >= 0) & (u + down < H) & (v + right >= 0) & (v + right < W)
            d = tl.load(a + (m + down * W + right)[:, None] * CK + k[None, :], mask=inside[:, None], other=0.0)
            if BACK:
                f = tl.load(w + (k[:, None] * (KH * KW) + tap) * CN + c[None, :])
                total = tl.dot(d, f, total)
            else:
                f = tl.load(w + (c[:, None] * (KH * KW) + tap) * CK + k[None, :])
                total = tl.dot(d, tl.trans(f), total)
        tl.store(out + m[:, None] * CN + c[None, :], total, mask=(m < pixels)[:, None])


class Tile(NamedTuple):
    """A program's share of outputs or input gradients."""

    pixels: int
    channels: int
    summed: int
    """Channels of a step of its sum."""
    warps: int = 4
    stages: int = 4


HALVED = {(64, 128): Tile(128, 64, 64), (128, 256): Tile(64, 64, 64), (256, 512): Tile(64, 64, 64)}
"""By inputs and outputs: 3x3 layers with stride 2 whose input gradients a kernel computes."""
SAME = {
    ("forward", 64, 64): Tile(128, 64, 64, stages=3),
    ("backward", 64, 64): Tile(128, 64, 64, stages=3),
    ("forward", 128, 128): Tile(128, 64, 64, stages=3),
    ("backward", 128, 128): Tile(128, 64, 64, stages=3),
    ("forward", 256, 256): Tile(64, 64, 64, stages=4),
}
"""By direction, inputs and outputs: 3x3 layers with stride 1 that a kernel computes."""
MOST_IMAGES = 96
"""Of such a layer: at batch 64 a ResNet-18 is 2 % faster with the kernel than with the library, at 128 4 % slower."""


def same_tile(direction: str, layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tile | None:
    """For the layer's outputs (``forward``) or input gradients (``backward``); None where the library computes them."""
    plain = (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    if triton is None or not x.is_cuda or x.dtype != torch.bfloat16 or layer.groups != 1 or layer.bias is not None:
        return None
    fits = len(x) <= MOST_IMAGES and x.shape[1] == layer.in_channels
    fits = fits and x.is_contiguous(memory_format=torch.channels_last)
    fits = fits and max(x.shape[1], layer.out_channels) * len(x) * x[0, 0].numel() < 2**31
    return SAME.get((direction, layer.in_channels, layer.out_channels)) if plain and fits else None


def same_size(a: Tensor, w: Tensor, tile: Tile, *, back: bool) -> Tensor:
    """Outputs of a 3x3 layer with stride 1 for images a, or its input gradients for output gradients a; all
    channels-last."""
    (n, summed, height, width), channels = a.shape, w.shape[1 if back else 0]
    bm, bn, bk, warps, stages = tile
    out = torch.empty(n, channels, height, width, dtype=a.dtype, device=a.device, memory_format=torch.channels_last)
    _same_kernel[(triton.cdiv(n * height * width, bm), channels // bn)](
        a, w, out, n * height * width, H=height, W=width, CK=summed, CN=channels, KH=3, KW=3, BACK=back, BM=bm,
        BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def has_halved(shape: Shape) -> bool:
    """Whether a kernel computes the layer's input gradient."""
    inputs, outputs, kh, kw, stride, up, side = shape.layer
    hi, wi, ho, wo = shape.space
    fits = stride == 2 and kh == kw and (up, side) == (kh // 2, kw // 2) and (hi, wi) == (2 * ho, 2 * wo)
    return fits and kh == 3 and (inputs, outputs) in HALVED


def halved_inputs(dy: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """The input gradient of a layer with stride 2; all channels-last."""
    inputs, outputs, kh, kw, _, up, side = shape.layer
    hi, wi, ho, wo = shape.space
    bm, bn, bk, warps, stages = HALVED[inputs, outputs]
    dx = torch.empty(len(dy), inputs, hi, wi, device=dy.device, dtype=dy.dtype, memory_format=torch.channels_last)
    _halved_kernel[(triton.cdiv(len(dy) * ho * wo, bm), inputs // bn, 4)](
        dy, w, dx, len(dy), HI=hi, WI=wi, HO=ho, WO=wo, CI=inputs, CO=outputs, KH=kh, KW=kw, PAD_H=up,
        PAD_W=side, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx
