"""A local step on the device in two parts: a pass, which gives group gradients, and the update.

Both are functions of few records of tensors, so that a lane can record them with its buffers in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.methods.base import Batch, LocalStep, Method
from fedtail.simulate.batched.step import logit_gradient
from fedtail.simulate.graph.network import DeviceModel

AGREES = 0.1
"""Relative difference of gradients in bfloat16 that is rounding; a kernel that is wrong is off by 1."""


class Resident(NamedTuple):
    """The tensors that all local runs read."""

    x: Tensor
    """Samples of the pool and, behind them, of the test set, as ``DeviceModel.stored`` makes them."""
    y: Tensor
    start: Tensor
    """(n,) the round's global model, in the device's layout."""


class Local(NamedTuple):
    """The tensors of one local run."""

    params: Tensor
    """(d,) float32."""
    rest: Tensor
    """Frozen parameters and buffers."""
    shadow: Tensor | None
    """``params`` in the type that passes compute in, where that is another."""
    groups: Tensor
    """(C,) group of each class."""
    const: Tensors
    state: Tensors
    hyper: Tensors

    @property
    def weights(self) -> Tensor:
        """The parameters as passes read them."""
        return self.params if self.shadow is None else self.shadow


class PassInput(NamedTuple):
    """The samples of a pass, one entry each; see ``passes.Schedule``."""

    rows: Tensor
    scales: Tensor
    draws: Tensor | None = None


Sizes = tuple[int, ...]
"""Rows of each group in a pass, or of all of them."""
Gradients = Callable[[Resident, Local, PassInput, Sizes], tuple[Tensor, Tensor, Tensors]]
"""A pass: flat gradients (H, d) of the groups, the mean loss of its batch, and the step state."""


def gradient_function(model: DeviceModel, method: Method, n_groups: int) -> Gradients:
    """The pass of a method: one forward pass, and one backward pass for all groups where rows are sorted by group and
    the network keeps groups apart, otherwise one for each."""
    student = model.network(training=True)
    teacher = model.network(training=False) if method.traits.needs_teacher else None
    named, side, dtype = model.layout.named, model.side, model.numerics.weights
    d = model.layout.n_params

    def gradients(resident: Resident, local: Local, given: PassInput, sizes: Sizes) -> tuple[Tensor, Tensor, Tensors]:
        own, at_once = local.weights, len(sizes) == n_groups
        real = given.rows >= 0
        index = torch.where(real, given.rows, -given.rows - 1)
        x, y = model.inputs(resident.x, index, given.draws), resident.y[index]
        weights = [{n: w.detach().requires_grad_() for n, w in named(own).items()} for _ in sizes]
        flat = torch.empty(n_groups, own.numel(), dtype=own.dtype, device=own.device)
        places = [named(row) for row in flat]
        side.places = places if at_once and len(sizes) <= 2 else []
        logits, guide = student(weights, local.rest, x, sizes), None
        if teacher is not None:
            with torch.no_grad():
                guide = teacher([named(resident.start[:d].to(dtype))] * len(sizes), resident.start[d:], x, sizes)
        state = local.state if method.traits.stateful_loss else {}
        batch = Batch(y, real.to(torch.float32), guide)
        losses, signal, state = logit_gradient(method, logits.detach().T, batch, local.const, state, given.scales)
        signals, leaves = [signal.T], [w for group in weights for w in group.values()]
        if not at_once:
            member = local.groups[y].unsqueeze(1)
            signals = [torch.where(member == h, signal.T, 0.0) for h in range(n_groups)]
        for h, part in enumerate(signals):
            more = h < len(signals) - 1
            grads = torch.autograd.grad(logits, leaves, part, retain_graph=more, allow_unused=True)
            side.join()
            wanted = [place for group in (places if at_once else [places[h]]) for place in group.values()]
            _settle(wanted, grads)
        return flat, (losses * given.scales).sum(), state

    return gradients


def _settle(places: list[Tensor], grads: tuple[Tensor | None, ...]) -> None:
    """Gradients go where they are wanted, unless they are there."""
    pairs = list(zip(places, grads, strict=True))
    for place in (p for p, grad in pairs if grad is None):
        place.zero_()
    left = [(p, g) for p, g in pairs if g is not None and p.data_ptr() != g.data_ptr()]
    if left:  # one balanced kernel; concatenation is bound by the largest of the many pieces
        torch._foreach_copy_([p for p, _ in left], [g for _, g in left])


Update = Callable[[Local, Tensor, Tensor], None]
"""Takes the step from the group gradients (H, d), in place."""


@lru_cache(maxsize=64)
def update_function(method: Method, compile: bool, kernels: bool = False) -> Update:
    """x <- x - lr (direction + weight_decay x), in place, with the step state and the compute copy of x.

    The same function for the same method, so that many runs in one process compile it once.
    """

    def update(local: Local, start: Tensor, grads: Tensor) -> None:
        params, state, hyper = local.params, local.state, local.hyper
        step, new = method.direction(LocalStep(grads.float(), params, start, local.const, state, hyper))
        params.sub_(hyper["lr"] * (step + hyper["weight_decay"] * params))
        for name, value in new.items():
            if value is not state[name]:
                state[name].copy_(value)
        if local.shadow is not None:
            local.shadow.copy_(params)

    # one code object serves all methods; past its limit of variants the compiler would silently give up on it
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), 1024))
    plain = torch.compile(update, dynamic=False) if compile else update

    def by_kernel(local: Local, start: Tensor, grads: Tensor) -> None:
        if has_kernel(local.params, grads):
            momentum_step(local.params, local.shadow, local.state["momentum"], grads, local.hyper)
        else:
            plain(local, start, grads)

    return by_kernel if kernels and normalizes_momentum(method) else plain


def normalizes_momentum(method: Method) -> bool:
    """Whether a method's steps are those of the kernels: every group's momentum is brought to length 1."""
    return method.traits.group_momentum and getattr(method, "length", "unit") == "unit"


def agree(step: Callable[[bool], Tensor]) -> bool:
    """Whether our kernels run on this GPU and do what the library does: ``step`` gives what a step comes to, row by
    row, with kernels or without."""
    try:
        ours = step(True)
        float(ours[0, 0])  # waits
    except Exception as error:  # too little shared memory, a compiler that does not know the GPU ...
        warnings.warn(f"kernels are left to the libraries: {type(error).__name__}: {error}", stacklevel=2)
        return False
    theirs = step(False)
    apart = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)
    if bool((apart <= AGREES).all()):
        return True
    warnings.warn(f"kernels are left to the libraries: steps differ by {apart.tolist()}", stacklevel=2)
    return False


try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

BLOCK, AT_ONCE = 4096, 1024
"""Parameters of a program of the momentum step's kernels, and those that it reads at once.

The norms of all of the momentum must be known before the first parameter moves, so there are two passes: one reads the
gradients and leaves momentum and sums of squares, one reads the momentum and moves the parameters. A compiler moves
half as much memory again; at small batches that is a tenth of a step. Sums are added in a fixed order."""
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
