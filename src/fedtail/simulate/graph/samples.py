"""The two ends of a pass, each in one kernel: images as the network reads them, and the cross-entropy of its outputs.

Ordinary operations need thirty kernels for the first and fifteen for the second, of a microsecond or two each, which is
a tenth of a step of few samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtail.data.images.augment import BASIC, PAD

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

FILLED = 8
"""Channels that images are filled up to with zeros: without them a first layer misses the matrix units."""


if triton is not None:

    @triton.jit
    def _images_kernel(  # type: ignore[no-untyped-def]
        pool,
        labels,
        rows,
        draws,
        mean,
        std,
        scale,
        x,
        y,
        real,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        PAD: tl.constexpr,
        DRAWN: tl.constexpr,
        FILLED: tl.constexpr,
        B: tl.constexpr,
    ):
        """x: (N, H, W, FILLED)."""
        n = tl.program_id(0).to(tl.int64)
        p = tl.program_id(1) * B + tl.arange(0, B)
        row = tl.load(rows + n)
        index = tl.where(row >= 0, row, -row - 1)
        if tl.program_id(1) == 0:
            tl.store(y + n, tl.load(labels + index))
            tl.store(real + n, tl.where(row >= 0, 1.0, 0.0))
        u = p // W
        v = p % W
        if DRAWN:
            v = tl.where(tl.load(draws + n * 3 + 2) > 0, W - 1 - v, v) + (tl.load(draws + n * 3 + 1) - PAD).to(tl.int32)
            u = u + (tl.load(draws + n * 3) - PAD).to(tl.int32)
        c = tl.arange(0, FILLED)
        inside = (p < H * W) & (u >= 0) & (u < H) & (v >= 0) & (v < W)
        used = inside[:, None] & (c < C)[None, :]
        value = tl.load(pool + index * (C * H * W) + c[None, :] * (H * W) + (u * W + v)[:, None], mask=used, other=0)
        centre = tl.load(mean + c, mask=c < C, other=0.0)
        width = tl.load(std + c, mask=c < C, other=1.0)
        out = (value.to(tl.float32) * scale - centre[None, :]) / width[None, :]
        at = (n * (H * W) + p)[:, None] * FILLED + c[None, :]
        tl.store(x + at, tl.where(used, out, 0.0), mask=(p < H * W)[:, None])

    @triton.jit
    def _entropy_kernel(  # type: ignore[no-untyped-def]
        logits, y, real, out, chances, C: tl.constexpr, B: tl.constexpr
    ):
        n = tl.program_id(0)
        c = tl.arange(0, B)
        z = tl.load(logits + n * C + c, mask=c < C, other=float("-inf")).to(tl.float32)
        z = z - tl.max(z, 0)
        e = tl.exp(z)
        total = tl.sum(e, 0)
        mine = tl.sum(tl.where(c == tl.load(y + n), z, 0.0), 0)
        weight = tl.load(real + n)
        tl.store(out + n, tl.where(weight > 0.0, tl.log(total) - mine, 0.0))
        tl.store(chances + n * C + c, e / total, mask=c < C)

    @triton.jit
    def _entropy_back_kernel(  # type: ignore[no-untyped-def]
        chances, y, real, upstream, dlogits, C: tl.constexpr, B: tl.constexpr
    ):
        n = tl.program_id(0)
        c = tl.arange(0, B)
        p = tl.load(chances + n * C + c, mask=c < C, other=0.0)
        d = tl.load(upstream + n) * (p - tl.where(c == tl.load(y + n), 1.0, 0.0))
        tl.store(dlogits + n * C + c, tl.where(tl.load(real + n) > 0.0, d, 0.0), mask=c < C)


class Look(NamedTuple):
    """How stored pixels become inputs: (pixel scale - mean) / std."""

    scale: float
    mean: Tensor
    """(channels,)."""
    std: Tensor


class Images(NamedTuple):
    """A pass's samples."""

    x: Tensor
    """(N, FILLED, H, W), channels-last."""
    y: Tensor
    real: Tensor
    """float32, 0 for filling."""


def takes_images(pool: Tensor, draws: Tensor | None) -> bool:
    """Whether the kernel reads these: images of few channels with a crop and flip, or none."""
    plain = pool.ndim == 4 and pool.shape[1] < FILLED and pool.is_contiguous()
    return triton is not None and plain and (draws is None or draws.shape[1] == BASIC)


def read_images(
    pool: Tensor, labels: Tensor, rows: Tensor, draws: Tensor | None, look: Look, dtype: torch.dtype
) -> Images:
    """Samples ``rows`` of the pool, ~index for filling, cropped and flipped as drawn; as ``Transform`` and
    ``apply_augment`` do."""
    n, (channels, height, width) = len(rows), pool.shape[1:]
    x = torch.empty(n, height, width, FILLED, dtype=dtype, device=pool.device)
    y = torch.empty(n, dtype=labels.dtype, device=pool.device)
    real = torch.empty(n, device=pool.device)
    block = min(256, triton.next_power_of_2(height * width))
    _images_kernel[(n, triton.cdiv(height * width, block))](
        pool,
        labels,
        rows,
        rows if draws is None else draws,
        look.mean,
        look.std,
        look.scale,
        x,
        y,
        real,
        C=channels,
        H=height,
        W=width,
        PAD=PAD,
        DRAWN=draws is not None,
        FILLED=FILLED,
        B=block,
        num_warps=4,
    )
    return Images(x=x.permute(0, 3, 1, 2), y=y, real=real)


class Entropy(torch.autograd.Function):
    """(N,) float32 cross-entropy of logits (N, C), 0 for filling."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, real: Tensor) -> Tensor:
        n, c = logits.shape
        out, chances = torch.empty(n, device=logits.device), torch.empty(n, c, device=logits.device)
        ctx.dtype = logits.dtype
        _entropy_kernel[(n,)](logits.contiguous(), y, real, out, chances, C=c, B=triton.next_power_of_2(c), num_warps=1)
        ctx.save_for_backward(chances, y, real)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        chances, y, real = ctx.saved_tensors
        n, c = chances.shape
        dlogits = torch.empty(n, c, dtype=ctx.dtype, device=chances.device)
        _entropy_back_kernel[(n,)](
            chances, y, real, upstream[0].contiguous(), dlogits, C=c, B=triton.next_power_of_2(c), num_warps=1
        )
        return dlogits, None, None
