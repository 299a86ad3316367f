"""GroupNorm with the addition and the ReLU behind it in one kernel each way, for channels-last images.

    z = (x - mean) * rstd * w + b  (+ residual),   y = max(z, 0)

A compiler needs two to four kernels for each direction; a ResNet has twenty of these layers, and at the batch sizes
of federated learning the number of kernels is what a step costs. The backward pass leaves the sums over space of
every sample, so that the gradients of w and b come per class group at no extra cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

LARGEST = 32768
"""Values that a program takes at once; of more, a quarter of it at a time."""
SPACIOUS = 512
"""Pixels from which the backward pass takes fewer channels at a time: it keeps two values of each."""


if triton is not None:

    @triton.jit
    def _even(base, p, c, space, C: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        """Where pixels at even rows and columns lie in a tensor of these alone, and which of them are."""
        even = (p < space) & (p % WIDTH % 2 == 0) & (p // WIDTH % 2 == 0)
        place = (p // WIDTH // 2 * (WIDTH // 2) + p % WIDTH // 2)[:, None] * C + c[None, :]
        return base // 4 + place, even[:, None]

    @triton.jit
    def _forward_kernel(  # type: ignore[no-untyped-def]
        x, residual, w, b, y, half, mean, rstd, space, eps,
        C: tl.constexpr, CG: tl.constexpr, CB: tl.constexpr, BH: tl.constexpr, ONCE: tl.constexpr,
        RELU: tl.constexpr, RESIDUAL: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """HALF: also ``half``, y at even rows and columns of an image of WIDTH."""
        n = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
        GB: tl.constexpr = CB // CG
        c = block * CB + tl.arange(0, CB)
        base = n * space * C
        count = space * CG
        if ONCE:  # the whole of a sample's channels fits: read it once
            p = tl.arange(0, BH)
            at = base + p[:, None] * C + c[None, :]
            inside = (p < space)[:, None]
            kept = tl.load(x + at, mask=inside, other=0.0)
            v = kept.to(tl.float32)
            total = tl.sum(v, 0)
            square = tl.sum(v * v, 0)
        else:
            totals = tl.zeros([BH, CB], tl.float32)
            squares = tl.zeros([BH, CB], tl.float32)
            for i in range(0, space, BH):
                p = i + tl.arange(0, BH)
                at = base + p[:, None] * C + c[None, :]
                v = tl.load(x + at, mask=(p < space)[:, None], other=0.0).to(tl.float32)
                totals += v
                squares += v * v
            total = tl.sum(totals, 0)
            square = tl.sum(squares, 0)
        mu = tl.sum(tl.reshape(total, [GB, CG]), 1) / count
        var = tl.sum(tl.reshape(square, [GB, CG]), 1) / count - mu * mu
        r = 1.0 / tl.sqrt(tl.maximum(var, 0.0) + eps)
        g = n * (C // CG) + block * GB + tl.arange(0, GB)
        tl.store(mean + g, mu)
        tl.store(rstd + g, r)
        mu_c = tl.reshape(tl.broadcast_to(mu[:, None], [GB, CG]), [CB])
        r_c = tl.reshape(tl.broadcast_to(r[:, None], [GB, CG]), [CB])
        scale = r_c * tl.load(w + c).to(tl.float32)
        shift = tl.load(b + c).to(tl.float32) - mu_c * scale
        if ONCE:
            z = kept.to(tl.float32) * scale[None, :] + shift[None, :]
            if RESIDUAL:
                z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            if RELU:
                z = tl.maximum(z, 0.0)
            tl.store(y + at, z, mask=inside)
            if HALF:
                quarter, even = _even(base, p, c, space, C, WIDTH)
                tl.store(half + quarter, z, mask=even)
        else:
            for i in range(0, space, BH):
                p = i + tl.arange(0, BH)
                at = base + p[:, None] * C + c[None, :]
                inside = (p < space)[:, None]
                z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
                if RESIDUAL:
                    z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
                if RELU:
                    z = tl.maximum(z, 0.0)
                tl.store(y + at, z, mask=inside)
                if HALF:
                    quarter, even = _even(base, p, c, space, C, WIDTH)
                    tl.store(half + quarter, z, mask=even)

    @triton.jit
    def _upstream(  # type: ignore[no-untyped-def]
        dy, more, y, base, p, c, space, C: tl.constexpr, RELU: tl.constexpr, MORE: tl.constexpr, WIDTH: tl.constexpr
    ):
        """The gradient of z at some pixels: dy and, MORE, the other reader's, where y is not cut off. MORE 2: the other
        has read even rows and columns."""
        at = base + p[:, None] * C + c[None, :]
        inside = (p < space)[:, None]
        d = tl.load(dy + at, mask=inside, other=0.0)
        if MORE == 1:
            d = (d.to(tl.float32) + tl.load(more + at, mask=inside, other=0.0).to(tl.float32)).to(d.dtype)
        if MORE == 2:
            quarter, even = _even(base, p, c, space, C, WIDTH)
            other = tl.load(more + quarter, mask=even, other=0.0)
            d = (d.to(tl.float32) + other.to(tl.float32)).to(d.dtype)
        if RELU:
            d = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, d, 0.0)
        return d

    @triton.jit
    def _backward_kernel(  # type: ignore[no-untyped-def]
        dy, more, x, y, w, mean, rstd, dx, dz, sums, which, wide, space,
        C: tl.constexpr, CG: tl.constexpr, CB: tl.constexpr, BH: tl.constexpr, ONCE: tl.constexpr,
        RELU: tl.constexpr, RESIDUAL: tl.constexpr, MORE: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
        GB: tl.constexpr = CB // CG
        c = block * CB + tl.arange(0, CB)
        base = n * space * C
        g = n * (C // CG) + block * GB + tl.arange(0, GB)
        mu_c = tl.reshape(tl.broadcast_to(tl.load(mean + g)[:, None], [GB, CG]), [CB])
        r_c = tl.reshape(tl.broadcast_to(tl.load(rstd + g)[:, None], [GB, CG]), [CB])
        w_c = tl.load(w + c).to(tl.float32)
        if ONCE:
            p = tl.arange(0, BH)
            at = base + p[:, None] * C + c[None, :]
            inside = (p < space)[:, None]
            kept_x = tl.load(x + at, mask=inside, other=0.0)
            kept_d = _upstream(dy, more, y, base, p, c, space, C, RELU, MORE, WIDTH)
            if RESIDUAL:
                tl.store(dz + at, kept_d, mask=inside)
            d = kept_d.to(tl.float32)
            a = tl.sum(d, 0)
            s = tl.sum(d * ((kept_x.to(tl.float32) - mu_c[None, :]) * r_c[None, :]), 0)
        else:
            plain = tl.zeros([BH, CB], tl.float32)
            scaled = tl.zeros([BH, CB], tl.float32)
            for i in range(0, space, BH):
                p = i + tl.arange(0, BH)
                at = base + p[:, None] * C + c[None, :]
                inside = (p < space)[:, None]
                d = _upstream(dy, more, y, base, p, c, space, C, RELU, MORE, WIDTH).to(tl.float32)
                v = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mu_c[None, :]) * r_c[None, :]
                plain += d
                scaled += d * v
            a = tl.sum(plain, 0)
            s = tl.sum(scaled, 0)
        tl.store(sums + n * wide + c, s)
        tl.store(sums + which + n * wide + c, a)
        count = space * CG
        a_g = tl.sum(tl.reshape(w_c * a, [GB, CG]), 1) / count
        s_g = tl.sum(tl.reshape(w_c * s, [GB, CG]), 1) / count
        a_c = tl.reshape(tl.broadcast_to(a_g[:, None], [GB, CG]), [CB])
        s_c = tl.reshape(tl.broadcast_to(s_g[:, None], [GB, CG]), [CB])
        if ONCE:
            v = (kept_x.to(tl.float32) - mu_c[None, :]) * r_c[None, :]
            d = kept_d.to(tl.float32)
            tl.store(dx + at, r_c[None, :] * (w_c[None, :] * d - a_c[None, :] - v * s_c[None, :]), mask=inside)
        else:
            for i in range(0, space, BH):
                p = i + tl.arange(0, BH)
                at = base + p[:, None] * C + c[None, :]
                inside = (p < space)[:, None]
                d = _upstream(dy, more, y, base, p, c, space, C, RELU, MORE, WIDTH).to(tl.float32)
                v = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mu_c[None, :]) * r_c[None, :]
                tl.store(dx + at, r_c[None, :] * (w_c[None, :] * d - a_c[None, :] - v * s_c[None, :]), mask=inside)
                if RESIDUAL:
                    tl.store(dz + at, d, mask=inside)

    @triton.jit
    def _reduce_kernel(  # type: ignore[no-untyped-def]
        sums, out, samples, first, C: tl.constexpr, CB: tl.constexpr, BN: tl.constexpr
    ):  # fmt: skip
        """sums (2, N, C) over the samples of each group go to out (H, 2, C); group 0 is the ``first`` samples."""
        h = tl.program_id(0)
        which = tl.program_id(1)
        c = tl.program_id(2) * CB + tl.arange(0, CB)
        real = c < C
        begin = tl.where(h == 0, 0, first)
        end = tl.where(h == 0, first, samples)
        total = tl.zeros([BN, CB], tl.float32)
        for i in range(begin, end, BN):
            n = i + tl.arange(0, BN)
            at = (which * samples + n)[:, None] * C + c[None, :]
            total += tl.load(sums + at, mask=(n < end)[:, None] & real[None, :], other=0.0)
        tl.store(out + (h * 2 + which) * C + c, tl.sum(total, 0), mask=real)


def has_kernel(channels: int, groups: int, device: torch.device) -> bool:
    """Whether the kernels take this layer; otherwise the same formulas run as ordinary operations."""
    per_group = channels // groups
    powers = channels & (channels - 1) == 0 and per_group & (per_group - 1) == 0
    return triton is not None and device.type == "cuda" and powers


def wanted_block(direction: str, space: int) -> tuple[int, int]:
    """Channels of a program, which takes one sample, and values per warp: the fastest on an H200."""
    return (16, 1024) if direction == "backward" and space > SPACIOUS else (32, 2048)


def _blocks(direction: str, channels: int, groups: int, space: int) -> dict[str, Any]:
    wanted, per_warp = wanted_block(direction, space)
    cb = max(channels // groups, min(channels, wanted))
    whole = 1 << (space - 1).bit_length()
    rows = whole if whole * cb <= LARGEST else max(1, LARGEST // 4 // cb)
    warps = min(16, max(1, rows * cb // per_warp))
    return {"C": channels, "CG": channels // groups, "CB": cb, "BH": rows, "ONCE": rows == whole, "num_warps": warps}


class Saved(NamedTuple):
    """Tensors of the forward pass that the backward pass needs."""

    x: Tensor
    """(N, C, ...)."""
    y: Tensor
    w: Tensor
    mean: Tensor
    """(N, groups)."""
    rstd: Tensor


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor,
    b: Tensor,
    groups: int,
    eps: float,
    *,
    relu: bool,
    kernel: bool,
    halved: bool = False,
) -> tuple[Saved, Tensor | None]:
    """The layer's output y with what belongs to it, and where ``halved`` y at even rows and columns. x: (N, C, ...),
    channels-last when ``kernel``."""
    n, channels = x.shape[:2]
    if not kernel:
        flat = x.float().reshape(n, groups, -1)
        mean, var = flat.mean(-1), flat.var(-1, unbiased=False)
        rstd = torch.rsqrt(var + eps)
        shape = (1, channels) + (1,) * (x.ndim - 2)
        z = ((flat - mean[..., None]) * rstd[..., None]).reshape(x.shape) * w.float().view(shape)
        z = z + b.float().view(shape)
        if residual is not None:
            z = z + residual.float()
        y = (z.clamp_min(0.0) if relu else z).to(x.dtype)
        return Saved(x=x, y=y, w=w, mean=mean, rstd=rstd), y[:, :, ::2, ::2].clone() if halved else None
    y = torch.empty_like(x)
    half = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last) if halved else None
    mean = torch.empty(n, groups, device=x.device)
    rstd = torch.empty_like(mean)
    space = x[0, 0].numel()
    blocks = _blocks("forward", channels, groups, space)
    _forward_kernel[(n, channels // blocks["CB"])](
        x, x if residual is None else residual, w, b, y, y if half is None else half, mean, rstd, space, eps,
        RELU=relu, RESIDUAL=residual is not None, HALF=halved, WIDTH=x.shape[-1] if halved else 1, **blocks,
    )  # fmt: skip
    return Saved(x=x, y=y, w=w, mean=mean, rstd=rstd), half


def norm_backward(
    dy: Tensor, saved: Saved, *, relu: bool, residual: bool, kernel: bool, more: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dz (the residual's gradient) and sums (2, N, C) over space, of which w's and b's gradients are made.

    ``more``: the gradient from another reader of y, or of its even rows and columns, which is added to dy.
    """
    x, y, w, mean, rstd = saved
    n, channels = x.shape[:2]
    groups = mean.shape[1]
    if not kernel:
        if more is not None:
            dy = dy.clone()
            (dy if more.shape == dy.shape else dy[:, :, ::2, ::2]).add_(more)
        d = torch.where(y > 0, dy, 0.0).float() if relu else dy.float()
        v = ((x.float().reshape(n, groups, -1) - mean[..., None]) * rstd[..., None]).reshape(x.shape)
        sums = torch.stack([(d * v).reshape(n, channels, -1).sum(-1), d.reshape(n, channels, -1).sum(-1)])
        count = x[0].numel() // groups
        s, a = ((w.float() * sums).reshape(2, n, groups, -1).sum(-1) / count).unbind()
        shape = (n, groups, -1)
        inner = (d * w.float().view(1, channels, *(1,) * (x.ndim - 2))).reshape(shape)
        dx = rstd[..., None] * (inner - a[..., None] - v.reshape(shape) * s[..., None])
        return dx.reshape(x.shape).to(x.dtype), d.to(x.dtype) if residual else None, sums
    dx = torch.empty_like(x)
    dz = torch.empty_like(x) if residual else None
    sums = torch.empty(2, n, channels, device=x.device)
    space = x[0, 0].numel()
    kind = 0 if more is None else 1 if more.shape == dy.shape else 2
    blocks = _blocks("backward", channels, groups, space)
    _backward_kernel[(n, channels // blocks["CB"])](
        dy, dy if more is None else more, x, y, w, mean, rstd, dx, dx if dz is None else dz, sums, sums.stride(0),
        sums.stride(1), space, RELU=relu, RESIDUAL=residual, MORE=kind, WIDTH=x.shape[-1] if kind == 2 else 1, **blocks,
    )  # fmt: skip
    return dx, dz, sums


def norm_gradients(sums: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, kernel: bool) -> Tensor:
    """(H, 2, C) gradients of w and b for each group of samples, from what ``norm_backward`` leaves."""
    if not kernel:
        return torch.stack([part.sum(1) for part in sums.split(list(sizes), dim=1)]).to(dtype)
    _, n, channels = sums.shape
    out = torch.empty(len(sizes), 2, channels, device=sums.device, dtype=dtype)
    _reduce_kernel[(len(sizes), 2, triton.cdiv(channels, 64))](
        sums, out, n, sizes[0], C=channels, CB=64, BN=32, num_warps=4
    )
    return out
