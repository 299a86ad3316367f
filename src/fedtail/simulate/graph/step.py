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
from fedtail.simulate.graph.momentum import has_kernel, momentum_step
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
