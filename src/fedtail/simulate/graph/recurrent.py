"""An LSTM layer in one kernel each way, over all its time steps.

    i, f, g, o = x W_ih' + h W_hh' + b,   c <- sigmoid(f) c + sigmoid(i) tanh(g),   h <- sigmoid(o) tanh(c)

A library takes several kernels for every time step, which at the batch sizes of federated learning is nothing but
launches. Rows do not influence each other, so a program takes a few of them through all steps, with h and c in
registers. The backward pass leaves the gradients of the gates; weight gradients are products over all rows and steps
of a class group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

ROWS = 16
"""Of a program; the least that matrix units take."""
SIZES = (16, 32, 64, 128)
"""Hidden sizes that fit a program."""


if triton is not None:

    @triton.jit
    def _tanh(x):  # type: ignore[no-untyped-def]
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0

    @triton.jit
    def _weight(w, gate, H: tl.constexpr, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
        """(H, H) of a gate's recurrent weights; turned: input by output."""
        a = tl.arange(0, H)
        row = gate * H + (a[None, :] if TURNED else a[:, None])
        column = a[:, None] if TURNED else a[None, :]
        return tl.load(w + row * H + column)

    @triton.jit
    def _gate(gates, b, w, h, at, inside, gate, H: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
        c = gate * H + tl.arange(0, H)
        z = tl.load(gates + at * 4 * H + c[None, :], mask=inside, other=0.0).to(tl.float32)
        z += tl.load(b + c)[None, :]
        return z + tl.dot(h, _weight(w, gate, H, True), input_precision=PRECISION)

    @triton.jit
    def _forward_kernel(  # type: ignore[no-untyped-def]
        gates,
        w,
        b,
        y,
        cells,
        acts,
        rows,
        STEPS: tl.constexpr,
        H: tl.constexpr,
        BN: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
        k = tl.arange(0, H)[None, :]
        inside = n < rows
        h = tl.zeros([BN, H], y.dtype.element_ty)
        c = tl.zeros([BN, H], tl.float32)
        for t in range(STEPS):
            at = n * STEPS + t
            i = tl.sigmoid(_gate(gates, b, w, h, at, inside, 0, H, PRECISION))
            f = tl.sigmoid(_gate(gates, b, w, h, at, inside, 1, H, PRECISION))
            g = _tanh(_gate(gates, b, w, h, at, inside, 2, H, PRECISION))
            o = tl.sigmoid(_gate(gates, b, w, h, at, inside, 3, H, PRECISION))
            c = f * c + i * g
            h = (o * _tanh(c)).to(y.dtype.element_ty)
            tl.store(acts + at * 4 * H + k, i, mask=inside)
            tl.store(acts + at * 4 * H + H + k, f, mask=inside)
            tl.store(acts + at * 4 * H + 2 * H + k, g, mask=inside)
            tl.store(acts + at * 4 * H + 3 * H + k, o, mask=inside)
            tl.store(cells + at * H + k, c, mask=inside)
            tl.store(y + at * H + k, h, mask=inside)

    @triton.jit
    def _backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        w,
        cells,
        acts,
        dgates,
        rows,
        STEPS: tl.constexpr,
        H: tl.constexpr,
        BN: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
        k = tl.arange(0, H)[None, :]
        inside = n < rows
        dh = tl.zeros([BN, H], tl.float32)
        dc = tl.zeros([BN, H], tl.float32)
        for s in range(STEPS):
            at = n * STEPS + (STEPS - 1 - s)
            i = tl.load(acts + at * 4 * H + k, mask=inside, other=0.0)
            f = tl.load(acts + at * 4 * H + H + k, mask=inside, other=0.0)
            g = tl.load(acts + at * 4 * H + 2 * H + k, mask=inside, other=0.0)
            o = tl.load(acts + at * 4 * H + 3 * H + k, mask=inside, other=0.0)
            c = _tanh(tl.load(cells + at * H + k, mask=inside, other=0.0))
            before = tl.load(cells + (at - 1) * H + k, mask=inside & (s < STEPS - 1), other=0.0)
            dh += tl.load(dy + at * H + k, mask=inside, other=0.0).to(tl.float32)
            dc += dh * o * (1.0 - c * c)
            di = (dc * g * i * (1.0 - i)).to(dgates.dtype.element_ty)
            df = (dc * before * f * (1.0 - f)).to(dgates.dtype.element_ty)
            dg = (dc * i * (1.0 - g * g)).to(dgates.dtype.element_ty)
            do = (dh * c * o * (1.0 - o)).to(dgates.dtype.element_ty)
            dc = dc * f
            tl.store(dgates + at * 4 * H + k, di, mask=inside)
            tl.store(dgates + at * 4 * H + H + k, df, mask=inside)
            tl.store(dgates + at * 4 * H + 2 * H + k, dg, mask=inside)
            tl.store(dgates + at * 4 * H + 3 * H + k, do, mask=inside)
            dh = tl.dot(di, _weight(w, 0, H, False), input_precision=PRECISION)
            dh += tl.dot(df, _weight(w, 1, H, False), input_precision=PRECISION)
            dh += tl.dot(dg, _weight(w, 2, H, False), input_precision=PRECISION)
            dh += tl.dot(do, _weight(w, 3, H, False), input_precision=PRECISION)


def has_kernel(hidden: int, device: torch.device) -> bool:
    """Whether the kernels take this layer; otherwise the same formulas run as ordinary operations."""
    return triton is not None and device.type == "cuda" and hidden in SIZES


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    y: Tensor
    """(N, T, H)."""
    cells: Tensor
    """(N, T, H) float32."""
    acts: Tensor
    """(N, T, 4H) float32: i, f, g, o."""


def lstm_forward(gates: Tensor, w: Tensor, b: Tensor, *, kernel: bool) -> Saved:
    """gates: (N, T, 4H) of the inputs; w: (4H, H) recurrent; b: (4H,) float32, both biases."""
    n, steps, width = gates.shape
    hidden = width // 4
    if kernel:
        saved = Saved(
            y=gates.new_empty(n, steps, hidden),
            cells=torch.empty(n, steps, hidden, device=gates.device),
            acts=torch.empty(n, steps, width, device=gates.device),
        )
        _forward_kernel[(triton.cdiv(n, ROWS),)](
            gates,
            w,
            b,
            saved.y,
            saved.cells,
            saved.acts,
            n,
            STEPS=steps,
            H=hidden,
            BN=ROWS,
            PRECISION=_precision(w),
            num_warps=8,
            num_stages=1,
        )
        return saved
    h, c = gates.new_zeros(n, hidden), b.new_zeros(n, hidden)
    ys, cells, acts = [], [], []
    for t in range(steps):
        z = gates[:, t].to(b.dtype) + b + (h @ w.T).to(b.dtype)
        i, f, g, o = z.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = (o * c.tanh()).to(gates.dtype)
        ys.append(h)
        cells.append(c)
        acts.append(torch.cat([i, f, g, o], -1))
    return Saved(y=torch.stack(ys, 1), cells=torch.stack(cells, 1), acts=torch.stack(acts, 1))


def lstm_backward(dy: Tensor, w: Tensor, saved: Saved, *, kernel: bool) -> Tensor:
    """(N, T, 4H) gradients of the gates."""
    n, steps, hidden = dy.shape
    if kernel:
        out = dy.new_empty(n, steps, 4 * hidden)
        _backward_kernel[(triton.cdiv(n, ROWS),)](
            dy.contiguous(),
            w,
            saved.cells,
            saved.acts,
            out,
            n,
            STEPS=steps,
            H=hidden,
            BN=ROWS,
            PRECISION=_precision(w),
            num_warps=8,
            num_stages=1,
        )
        return out
    parts = []
    dh, dc = torch.zeros_like(saved.cells[:, 0]), torch.zeros_like(saved.cells[:, 0])
    for t in reversed(range(steps)):
        i, f, g, o = saved.acts[:, t].chunk(4, -1)
        c = saved.cells[:, t].tanh()
        before = saved.cells[:, t - 1] if t else torch.zeros_like(c)
        dh = dh + dy[:, t].to(dh.dtype)
        dc = dc + dh * o * (1 - c * c)
        dz = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * c * o * (1 - o)]
        parts.append(torch.cat(dz, -1).to(dy.dtype))
        dc = dc * f
        dh = (parts[-1] @ w).to(dh.dtype)
    return torch.stack(parts[::-1], 1)


def _precision(w: Tensor) -> str:
    """Of products in float32: TF32 where the process allows it."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or w.dtype != torch.float32 else "ieee"
