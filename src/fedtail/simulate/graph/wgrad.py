"""Weight gradients of a convolution, of all class groups in one launch, written where the update reads them.

    dW_h[o, r, s, i] = sum over the group's samples and output pixels of dy[.., o] x[.. + (r, s), i]

For each position (r, s) of the filter this is a product of two matrices with one row per pixel. A library is called
once per group, chooses small tiles for so few samples, and its results are copied afterwards. Here a program takes a
tile of (o, i) for one position, one group and one part of its pixels; parts are added in a fixed order, so that the
bits are always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

PIXELS = 64
"""Of a step of a program's sum."""
PROGRAMS = 264
"""As many at least are launched, two for each multiprocessor of a large GPU: pixels are cut into parts for it."""
MOST_PARTS = 32


if triton is not None:

    @triton.jit(do_not_specialize=["first", "second", "apart"])
    def _product_kernel(  # type: ignore[no-untyped-def]
        x, dy, out, first, second, apart,
        HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
        BO: tl.constexpr, BI: tl.constexpr, BP: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        """out: (H, parts, CO, KH, KW, CI), groups ``apart`` values from each other."""
        tile = tl.program_id(0)
        part = tl.program_id(1)
        group = tl.program_id(2)
        tap = tile % (KH * KW)
        o = (tile // (KH * KW)) % (CO // BO) * BO + tl.arange(0, BO)
        i = tile // (KH * KW) // (CO // BO) * BI + tl.arange(0, BI)
        begin = tl.where(group == 0, 0, first)
        pixels = tl.where(group == 0, first, second) * (HO * WO)
        length = tl.cdiv(tl.cdiv(pixels, PARTS), BP) * BP
        low = part * length
        high = tl.minimum(low + length, pixels)
        total = tl.zeros([BO, BI], tl.float32)
        for p in range(low, high, BP):
            q = p + tl.arange(0, BP)
            n = begin + q // (HO * WO)
            place = q % (HO * WO)
            row = place // WO * STRIDE + tap // KW - PAD_H
            column = place % WO * STRIDE + tap % KW - PAD_W
            ok = q < high
            inside = ok & (row >= 0) & (row < HI) & (column >= 0) & (column < WI)
            d = tl.load(dy + (begin * (HO * WO) + q)[:, None] * CO + o[None, :], mask=ok[:, None], other=0.0)
            v = tl.load(x + ((n * HI + row) * WI + column)[:, None] * CI + i[None, :], mask=inside[:, None], other=0.0)
            total = tl.dot(tl.trans(d), v, total)
        at = (o[:, None] * (KH * KW) + tap) * CI + i[None, :]
        tl.store(out + group * apart + part * (CO * KH * KW * CI) + at, total)

    @triton.jit(do_not_specialize=["apart"])
    def _sum_kernel(parts, out, apart, N: tl.constexpr, PARTS: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
        """out (H, N): the sum of parts (H, PARTS, N)."""
        at = tl.program_id(0) * B + tl.arange(0, B)
        group = tl.program_id(1)
        inside = at < N
        total = tl.zeros([B], tl.float32)
        for s in range(PARTS):
            total += tl.load(parts + (group * PARTS + s) * N + at, mask=inside, other=0.0)
        tl.store(out + group * apart + at, total, mask=inside)


@dataclass(frozen=True)
class Shape:
    """A convolution with the sizes of its images."""

    layer: tuple[int, int, int, int, int, int, int]
    """Inputs, outputs, filter height and width, stride, padding above and beside."""
    space: tuple[int, int, int, int]
    """Height and width of inputs and outputs."""


@cache
def tiles(shape: Shape) -> tuple[int, int]:
    """Outputs and inputs of a program; (0, 0) where the kernel does not take the layer."""
    inputs, outputs, *_ = shape.layer
    found = [next((b for b in (128, 64) if n % b == 0), 0) for n in (outputs, inputs)]
    return (found[0], found[1]) if all(found) else (0, 0)


def kernel_shape(layer: nn.Conv1d | nn.Conv2d, x: Tensor, dy: Tensor, groups: int) -> Shape | None:
    """The layer's shape where the kernel takes it: bfloat16 on a GPU, square strides, channels of whole tiles."""
    if triton is None or not x.is_cuda or x.dtype != torch.bfloat16 or layer.groups != 1 or groups > 2:
        return None
    if isinstance(layer, nn.Conv1d) or set(layer.dilation) != {1} or len(set(layer.stride)) > 1:
        return None
    assert not isinstance(layer.padding, str)
    _, outputs, ho, wo = dy.shape
    _, inputs, hi, wi = x.shape
    kh, kw = layer.kernel_size
    up, side = layer.padding
    shape = Shape((inputs, outputs, kh, kw, layer.stride[0], up, side), (hi, wi, ho, wo))
    return shape if all(tiles(shape)) else None


def weight_gradients(x: Tensor, dy: Tensor, sizes: Sequence[int], shape: Shape, places: Sequence[Tensor]) -> None:
    """Writes the gradient of each group's rows to its place: (outputs, inputs, height, width), channels-last, all
    places in one tensor, equally far apart. x and dy: channels-last."""
    inputs, outputs, kh, kw, stride, up, side = shape.layer
    hi, wi, ho, wo = shape.space
    bo, bi = tiles(shape)
    count, size = (outputs // bo) * (inputs // bi) * kh * kw, outputs * inputs * kh * kw
    longest = -(-max(sizes) * ho * wo // PIXELS)
    parts = max(1, min(-(-PROGRAMS // (count * len(sizes))), longest // 2, MOST_PARTS))
    apart = _apart(places)
    out = places[0] if parts == 1 else torch.empty(len(sizes), parts, size, device=x.device)
    second = sizes[1] if len(sizes) > 1 else 0
    _product_kernel[(count, parts, len(sizes))](
        x, dy, out, sizes[0], second, apart if parts == 1 else parts * size,
        HI=hi, WI=wi, HO=ho, WO=wo, CI=inputs, CO=outputs, KH=kh, KW=kw, STRIDE=stride, PAD_H=up, PAD_W=side,
        BO=bo, BI=bi, BP=PIXELS, PARTS=parts, num_warps=8 if bo * bi > 8192 else 4, num_stages=4,
    )  # fmt: skip
    if parts > 1:
        _sum_kernel[(triton.cdiv(size, 1024), len(sizes))](out, places[0], apart, N=size, PARTS=parts, B=1024)


def _apart(places: Sequence[Tensor]) -> int:
    """Values between the first two places."""
    return (places[1].data_ptr() - places[0].data_ptr()) // places[0].element_size() if len(places) > 1 else 0
