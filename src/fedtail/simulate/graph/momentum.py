"""The class-grouped normalized momentum step (``core.momentum``) in two kernels that move no more than they must.

The norms of all of the momentum must be known before the first parameter moves, so there are two passes: one reads the
gradients and leaves momentum and sums of squares, one reads the momentum and moves the parameters. A compiler computes
the momentum anew in each pass and writes it in a third, which is half as much memory traffic again; at small batches
that is a tenth of a step. Sums are added in a fixed order, so that the bits are always the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtail.core.records import Tensors

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

BLOCK, AT_ONCE = 4096, 1024
"""Parameters of a program, and those that it reads at once."""
GROUPS = (1, 2, 4)


if triton is not None:

    @triton.jit
    def _momentum_kernel(  # type: ignore[no-untyped-def]
        grads, momentum, squares, beta, size, H: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64)
        weight = 1.0 - tl.load(beta)
        for h in tl.static_range(H):
            total = tl.zeros([B], tl.float32)
            for i in range(BLOCK // B):
                at = block * BLOCK + i * B + tl.arange(0, B)
                inside = at < size
                m = tl.load(momentum + h * size + at, mask=inside, other=0.0)
                g = tl.load(grads + h * size + at, mask=inside, other=0.0).to(tl.float32)
                m = tl.where(weight < 0.5, m + weight * (g - m), g - (g - m) * (1.0 - weight))  # as torch.lerp
                tl.store(momentum + h * size + at, m, mask=inside)
                total += m * m
            tl.store(squares + h * tl.num_programs(0) + block, tl.sum(total, 0))

    @triton.jit
    def _step_kernel(  # type: ignore[no-untyped-def]
        momentum, x, shadow, squares, lr, decay, delta, size, H: tl.constexpr, BLOCK: tl.constexpr,
        B: tl.constexpr, BLOCKS: tl.constexpr, SHADOW: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64)
        count = tl.num_programs(0)
        parts = tl.arange(0, BLOCKS)
        h = tl.arange(0, H)
        square = tl.load(squares + h[:, None] * count + parts[None, :], mask=(parts < count)[None, :], other=0.0)
        norm = tl.sqrt(tl.sum(square, 1)) + tl.load(delta)
        factors = 1.0 / tl.where(norm > 0.0, norm, 1.0)
        rate = tl.load(lr)
        shrink = tl.load(decay)
        for i in range(BLOCK // B):
            at = block * BLOCK + i * B + tl.arange(0, B)
            inside = at < size
            total = tl.zeros([B], tl.float32)
            for g in tl.static_range(H):
                factor = tl.sum(tl.where(h == g, factors, 0.0), 0)
                total += tl.load(momentum + g * size + at, mask=inside, other=0.0) * factor
            before = tl.load(x + at, mask=inside, other=0.0)
            after = before - rate * (total + shrink * before)
            tl.store(x + at, after, mask=inside)
            if SHADOW:
                tl.store(shadow + at, after, mask=inside)


def has_kernel(params: Tensor, grads: object) -> bool:
    """Whether the kernels take a step with these gradients, (H, d) in one tensor."""
    fits = isinstance(grads, Tensor) and grads.shape[0] in GROUPS and grads.is_contiguous()
    return triton is not None and params.is_cuda and fits


def momentum_step(params: Tensor, shadow: Tensor | None, momentum: Tensor, grads: Tensor, hyper: Tensors) -> None:
    """x <- x - lr (sum_h m_h / (||m_h|| + delta) + weight_decay x), in place, with m and the compute copy of x."""
    groups, size = momentum.shape
    blocks = triton.cdiv(size, BLOCK)
    squares = torch.empty(groups, blocks, device=params.device)
    common = {"H": groups, "BLOCK": BLOCK, "B": AT_ONCE, "num_warps": 8}
    _momentum_kernel[(blocks,)](grads, momentum, squares, hyper["beta"], size, **common)
    _step_kernel[(blocks,)](
        momentum, params, params if shadow is None else shadow, squares, hyper["lr"], hyper["weight_decay"],
        hyper["delta"], size, BLOCKS=triton.next_power_of_2(blocks), SHADOW=shadow is not None, **common,
    )  # fmt: skip
