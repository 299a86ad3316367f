"""Weight gradients of a convolution, of all class groups in one launch, written where the update reads them.

    dW_h[o, r, s, i] = sum over the group's samples and output pixels of dy[.., o] x[.. + (r, s), i]

For each position (r, s) of the filter this is a product of two matrices with one row per pixel. A library is called
once per group, chooses small tiles for so few samples, and its results are copied afterwards. Here a program takes a
tile of (o, i) for one position, one group and one part of its pixels; parts are added in a fixed order, so that the
bits are always the same. A first layer of few channels takes all positions in one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

MOST_PARTS = 64
NARROW = 8
"""Channels of a first layer, filled up; see ``fused``."""


if triton is not None:

    @triton.jit(do_not_specialize=["first", "rest", "apart"])
    def _product_kernel(  # type: ignore[no-untyped-def]
        x, dy, out, first, rest, apart, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
        PAD_H: tl.constexpr, PAD_W: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BP: tl.constexpr,
        PARTS: tl.constexpr, ACROSS: tl.constexpr,
    ):  # fmt: skip
        """out: (H, parts, CO, KH, KW, CI), groups ``apart`` values from each other. ACROSS: a program takes the three
        positions of a row of the filter, for which it reads dy once."""
        tile = tl.program_id(0)
        part = tl.program_id(1)
        group = tl.program_id(2)
        TAPS: tl.constexpr = KH if ACROSS else KH * KW
        tap = tile % TAPS * KW if ACROSS else tile % TAPS
        o = (tile // TAPS) % (CO // BO) * BO + tl.arange(0, BO)
        i = tile // TAPS // (CO // BO) * BI + tl.arange(0, BI)
        begin = tl.where(group == 0, 0, first)
        pixels = tl.where(group == 0, first, rest) * (HO * WO)
        length = tl.cdiv(tl.cdiv(pixels, PARTS), BP) * BP
        low = part * length
        high = tl.minimum(low + length, pixels)
        total = tl.zeros([BO, BI], tl.float32)
        second = tl.zeros([BO, BI], tl.float32)
        third = tl.zeros([BO, BI], tl.float32)
        for p in range(low, high, BP):
            q = p + tl.arange(0, BP)
            n = begin + q // (HO * WO)
            place = q % (HO * WO)
            row = place // WO * STRIDE + tap // KW - PAD_H
            column = place % WO * STRIDE + tap % KW - PAD_W
            ok = q < high
            within = ok & (row >= 0) & (row < HI)
            inside = within & (column >= 0) & (column < WI)
            d = tl.load(dy + (begin * (HO * WO) + q)[:, None] * CO + o[None, :], mask=ok[:, None], other=0.0)
            here = x + ((n * HI + row) * WI + column)[:, None] * CI + i[None, :]
            v = tl.load(here, mask=inside[:, None], other=0.0)
            total = tl.dot(tl.trans(d), v, total)
            if ACROSS:
                inside = within & (column >= -1) & (column < WI - 1)
                second = tl.dot(tl.trans(d), tl.load(here + CI, mask=inside[:, None], other=0.0), second)
                inside = within & (column >= -2) & (column < WI - 2)
                third = tl.dot(tl.trans(d), tl.load(here + 2 * CI, mask=inside[:, None], other=0.0), third)
        at = out + group * apart + part * (CO * KH * KW * CI) + (o[:, None] * (KH * KW) + tap) * CI + i[None, :]
        tl.store(at, total)
        if ACROSS:
            tl.store(at + CI, second)
            tl.store(at + 2 * CI, third)

    @triton.jit(do_not_specialize=["first", "second"])
    def _narrow_kernel(  # type: ignore[no-untyped-def]
        x, dy, out, first, second, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        CI: tl.constexpr, CO: tl.constexpr, REAL: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
        STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr,
        BP: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        """out: (H, parts, CO, KH, KW, REAL); of the inputs' CI channels the first REAL are not filling."""
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        part = tl.program_id(1)
        group = tl.program_id(2)
        j = tl.arange(0, BN)
        tap = j // CI
        i = j % CI
        begin = tl.where(group == 0, 0, first)
        pixels = tl.where(group == 0, first, second) * (HO * WO)
        length = tl.cdiv(tl.cdiv(pixels, PARTS), BP) * BP
        low = part * length
        high = tl.minimum(low + length, pixels)
        total = tl.zeros([BO, BN], tl.float32)
        for p in range(low, high, BP):
            q = p + tl.arange(0, BP)
            n = begin + q // (HO * WO)
            place = q % (HO * WO)
            row = (place // WO * STRIDE - PAD_H)[:, None] + (tap // KW)[None, :]
            column = (place % WO * STRIDE - PAD_W)[:, None] + (tap % KW)[None, :]
            ok = q < high
            inside = ok[:, None] & (row >= 0) & (row < HI) & (column >= 0) & (column < WI) & (tap < KH * KW)[None, :]
            d = tl.load(dy + (begin * (HO * WO) + q)[:, None] * CO + o[None, :], mask=ok[:, None], other=0.0)
            v = tl.load(x + ((n[:, None] * HI + row) * WI + column) * CI + i[None, :], mask=inside, other=0.0)
            total = tl.dot(tl.trans(d), v, total)
        at = (o[:, None] * (KH * KW) + tap[None, :]) * REAL + i[None, :]
        used = ((tap < KH * KW) & (i < REAL))[None, :]
        tl.store(out + (group * PARTS + part) * (CO * KH * KW * REAL) + at, total, mask=used)

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


@dataclass(frozen=True)
class Plan:
    """How a layer's weight gradients are divided."""

    outputs: int
    inputs: int
    """A program's tile; for a NARROW layer all inputs at all positions of the filter."""
    pixels: int = 64
    """What a step of a program's sum takes."""
    stages: int = 4
    programs: int = 264
    """Programs launched at least, two for each multiprocessor of a large GPU: pixels are cut into parts for it."""

    across: bool = False
    """Whether a program takes all positions of a row of a 3x3 filter."""

    @property
    def warps(self) -> int:
        return 8 if self.outputs * self.inputs * (2 if self.across else 1) > 8192 else 4


PLANS = {
    (NARROW, 64, 3): Plan(outputs=64, inputs=128, pixels=64, stages=3, programs=132),
    (64, 64, 3): Plan(outputs=64, inputs=64, pixels=64, stages=3, programs=132),
    (128, 128, 3): Plan(outputs=64, inputs=64, pixels=64, stages=3, programs=132, across=True),
    (256, 256, 3): Plan(outputs=64, inputs=64, pixels=64, stages=4, programs=264),
    (512, 512, 3): Plan(outputs=128, inputs=64, pixels=64, stages=4, programs=264),
    (64, 128, 3): Plan(outputs=128, inputs=64, pixels=64, stages=3, programs=132),
    (128, 256, 3): Plan(outputs=128, inputs=64, pixels=64, stages=3, programs=132),
    (256, 512, 3): Plan(outputs=128, inputs=64, pixels=64, stages=4, programs=264),
    (64, 128, 1): Plan(outputs=64, inputs=64, pixels=64, stages=3, programs=66),
    (128, 256, 1): Plan(outputs=64, inputs=64, pixels=64, stages=3, programs=66),
    (256, 512, 1): Plan(outputs=64, inputs=64, pixels=64, stages=3, programs=66),
}
"""By inputs, outputs and height of the filter: the layers of a ResNet for which a kernel kept an H200 busier than the
library did, four at once with 21 and 11 samples, and its best plan (``benchmarks/kernels.py``)."""


def plan_of(shape: Shape) -> Plan | None:
    """None where the library takes the layer."""
    inputs, outputs, kh, kw, *_ = shape.layer
    return PLANS.get((inputs, outputs, kh)) if kh == kw else None


def kernel_shape(layer: nn.Conv1d | nn.Conv2d, x: Tensor, dy: Tensor) -> Shape | None:
    """The layer's shape where the kernels may take it: bfloat16 on a GPU, without bias, square strides."""
    if triton is None or not x.is_cuda or x.dtype != torch.bfloat16 or layer.groups != 1 or layer.bias is not None:
        return None
    if isinstance(layer, nn.Conv1d) or set(layer.dilation) != {1} or len(set(layer.stride)) > 1:
        return None
    if not all(t.is_contiguous(memory_format=torch.channels_last) and t.numel() < 2**31 for t in (x, dy)):
        return None  # positions are computed in 32 bits
    assert not isinstance(layer.padding, str)
    _, outputs, ho, wo = dy.shape
    _, inputs, hi, wi = x.shape
    kh, kw = layer.kernel_size
    up, side = layer.padding
    shape = Shape((inputs, outputs, kh, kw, layer.stride[0], up, side), (hi, wi, ho, wo))
    return shape


def weight_gradients(
    x: Tensor, dy: Tensor, *, sizes: Sequence[int], shape: Shape, plan: Plan, places: Sequence[Tensor]
) -> None:
    """Writes the gradient of each group's rows, of at most two groups, to its place: (outputs, inputs, height, width),
    channels-last, in one tensor with the other's. x and dy: channels-last; x may have filling behind its channels."""
    inputs, outputs, kh, kw, stride, up, side = shape.layer
    hi, wi, ho, wo = shape.space
    bo, bi = plan.outputs, plan.inputs
    narrow, real = inputs == NARROW, places[0].shape[1]
    count = outputs // bo * (1 if narrow else (inputs // bi) * kh * (1 if plan.across else kw))
    size = outputs * real * kh * kw
    longest = -(-max(sizes) * ho * wo // plan.pixels)
    parts = max(1, min(-(-plan.programs // (count * len(sizes))), longest // 2, MOST_PARTS))
    parts = max(parts, 2) if narrow else parts
    apart = _apart(places)
    out = places[0] if parts == 1 else torch.empty(len(sizes), parts, size, device=x.device)
    second = sizes[1] if len(sizes) > 1 else 0
    common = {
        "HI": hi, "WI": wi, "HO": ho, "WO": wo, "CI": inputs, "CO": outputs, "KH": kh, "KW": kw,
        "STRIDE": stride, "PAD_H": up, "PAD_W": side, "BO": bo, "BP": plan.pixels, "PARTS": parts,
        "num_stages": plan.stages, "num_warps": plan.warps,
    }  # fmt: skip
    grid = (count, parts, len(sizes))
    if narrow:
        _narrow_kernel[grid](x, dy, out, sizes[0], second, REAL=real, BN=bi, **common)
    else:
        far = apart if parts == 1 else parts * size
        _product_kernel[grid](x, dy, out, sizes[0], second, far, BI=bi, ACROSS=plan.across, **common)
    if parts > 1:
        _sum_kernel[(triton.cdiv(size, 1024), len(sizes))](out, places[0], apart, N=size, PARTS=parts, B=1024)


def _apart(places: Sequence[Tensor]) -> int:
    """Values between the first two places."""
    return (places[1].data_ptr() - places[0].data_ptr()) // places[0].element_size() if len(places) > 1 else 0
