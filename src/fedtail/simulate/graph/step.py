"""A local step on the device in two parts: a pass, which gives group gradients, and the update.

Both are functions of few records of tensors, so that a lane can record them with its buffers in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtail.core.records import Tensors
from fedtail.methods.base import Batch, LocalStep, Method
from fedtail.models.flat import has_batchnorm
from fedtail.simulate.graph.aside import Aside
from fedtail.simulate.graph.momentum import has_kernel, momentum_step
from fedtail.simulate.graph.network import DeviceModel, Weights
from fedtail.simulate.graph.samples import Entropy, read_images, takes_images

AGREES = 0.05
"""Relative difference of gradients in bfloat16 that is rounding; a kernel that is wrong is off by 1."""
COMPILER: dict[str, Any] = {"force_layout_optimization": True, "shape_padding": False}
"""Keep channels-last with a symbolic batch size, and do not tie the code to ranges of it."""


class Resident(NamedTuple):
    """What all local runs read."""

    x: Tensor
    """Samples of the pool and, behind them, of the test set."""
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
        """What passes read of ``params``."""
        return self.params if self.shadow is None else self.shadow


class PassInput(NamedTuple):
    """The samples of a pass, one entry each, in the order of the groups; see ``passes.Schedule``."""

    rows: Tensor
    scales: Tensor
    shares: Tensor
    draws: Tensor | None = None

    def part(self, begin: int, size: int) -> PassInput:
        """Some of them, as tensors of their own."""
        return PassInput(**{k: t[begin : begin + size].clone() for k, t in self._asdict().items() if t is not None})


Sizes = tuple[int, ...]
"""Rows of each group in a pass."""
Gradients = Callable[[Resident, Local, PassInput, Sizes], tuple[Sequence[Tensor] | Tensor, Tensor, Tensors]]
"""A pass: flat gradients (H, d) of its groups, its share of the step's loss, and the step state."""
Losses = Callable[[Sequence[Weights], Resident, Local, PassInput, Sizes], tuple[Tensor, Tensor, Tensors]]
"""Weights of each group and the samples -> loss of each, 0 for filling, its label, and the step state."""


def choose_mode(module: nn.Module, method: Method, n_groups: int) -> str:
    """How a step of this method on this model gets its gradients; see ``passes.MODES``."""
    if n_groups > 1 and (method.traits.stateful_loss or method.traits.whole_batch or has_batchnorm(module)):
        return "masked"
    return "joint" if n_groups <= 2 else "single"


def gradient_function(model: DeviceModel, method: Method, mode: str, n_groups: int) -> Gradients:
    """The pass of a method: one backward pass for all groups where the network is fused and samples do not influence
    each other, otherwise one for each."""
    losses, numerics = sample_losses(model, method), model.numerics
    if numerics.fused and mode != "masked":
        return fused_gradients(model, losses)
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.module.modules())
    compiled = numerics.compile and not recurrent and not numerics.fused  # the compiler leaves recurrent layers out
    return plain_gradients(losses, n_groups if mode == "masked" else 1, compiled)


def sample_losses(model: DeviceModel, method: Method) -> Losses:
    student = model.network(training=True)
    teacher = model.network(training=False) if method.traits.needs_teacher else None
    d, dtype = model.layout.n_params, model.numerics.weights
    plain = type(method).loss is Method.loss  # cross-entropy

    def losses(
        weights: Sequence[Weights], resident: Resident, local: Local, given: PassInput, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Tensors]:
        kernels = model.aside.kernels and model.look is not None
        if model.look is not None and kernels and takes_images(resident.x, given.draws):
            x, y, weight = read_images(resident.x, resident.y, given.rows, given.draws, model.look, dtype)
        else:
            real = given.rows >= 0
            index = torch.where(real, given.rows, -given.rows - 1)
            x, y, weight = model.inputs(resident.x, index, given.draws), resident.y[index], real.to(torch.float32)
        guide = None
        if teacher is not None:
            with torch.no_grad():
                start = resident.start
                guide = teacher([start[:d].to(dtype)] * len(sizes), start[d:], x, sizes)
        logits = student(weights, local.rest, x, sizes)
        if kernels and plain:
            return Entropy.apply(logits, y, weight), y, {}
        state = local.state if method.traits.stateful_loss else {}
        out, state = method.loss(logits, Batch(y, weight, guide), local.const, state)
        return torch.where(weight > 0, out, 0.0), y, state

    return losses


def fused_gradients(model: DeviceModel, losses: Losses) -> Gradients:
    named, aside = model.layout.named, model.aside

    def gradients(resident: Resident, local: Local, given: PassInput, sizes: Sizes) -> tuple[Tensor, Tensor, Tensors]:
        if local.params.is_cuda and not aside.checked:

            def attempt() -> Tensor:
                with torch.random.fork_rng(devices=[local.params.device]):  # both attempts draw the same masks
                    return once(resident, local, given, sizes)[0].float()

            aside.kernels = agree(attempt, aside)
            aside.checked = True
        return once(resident, local, given, sizes)

    def once(resident: Resident, local: Local, given: PassInput, sizes: Sizes) -> tuple[Tensor, Tensor, Tensors]:
        own = local.weights
        weights = [{n: w.detach().requires_grad_() for n, w in named(own).items()} for _ in sizes]
        flat = torch.empty(len(sizes), own.numel(), dtype=own.dtype, device=own.device)
        places = [named(row) for row in flat]
        aside.places = places if len(sizes) <= 2 else []
        out, _, state = losses(weights, resident, local, given, sizes)
        leaves = [w for group in weights for w in group.values()]
        grads = torch.autograd.grad(out, leaves, given.scales)
        aside.join()
        pairs = zip([place for group in places for place in group.values()], grads, strict=True)
        left = [(place, grad) for place, grad in pairs if place.data_ptr() != grad.data_ptr()]
        # one balanced kernel; concatenation is bound by the largest of the many pieces
        torch._foreach_copy_([place for place, _ in left], [grad for _, grad in left])
        return flat, (out.detach() * given.shares).sum(), state

    return gradients


def agree(gradients: Callable[[], Tensor], aside: Aside) -> bool:
    """Whether our kernels run on this GPU and give the library's gradients (H, d): tried once, on the first pass."""
    try:
        mine = gradients()
        float(mine[0, 0])  # waits
    except Exception as error:  # too little shared memory, a compiler that does not know the GPU ...
        aside.join()
        warnings.warn(f"kernels are left to the libraries: {type(error).__name__}: {error}", stacklevel=2)
        return False
    aside.kernels = False
    theirs = gradients()
    apart = (mine - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)
    if bool((apart <= AGREES).all()):
        return True
    warnings.warn(f"kernels are left to the libraries: gradients differ by {apart.tolist()}", stacklevel=2)
    return False


def plain_gradients(losses: Losses, width: int, compiled: bool) -> Gradients:
    """Group after group; with ``width`` > 1 all samples at once, and that many masked sums of their losses."""

    def sums(leaf: Tensor, resident: Resident, local: Local, given: PassInput) -> tuple[Tensor, Tensor, Tensors]:
        out, y, state = losses([leaf], resident, local, given, (given.rows.shape[0],))
        share = (out.detach() * given.shares).sum()
        if width == 1:
            return (out * given.scales).sum().reshape(1), share, state
        member = local.groups[y]
        parts = [torch.where(member == h, out * given.scales, 0.0).sum() for h in range(width)]
        return torch.stack(parts), share, state

    forward: Callable[..., Any] = torch.compile(sums, options=COMPILER) if compiled else sums

    def gradients(
        resident: Resident, local: Local, given: PassInput, sizes: Sizes
    ) -> tuple[list[Tensor], Tensor, Tensors]:
        own = local.weights
        flats: list[Tensor] = []
        total = torch.zeros((), device=own.device)
        state: Tensors = {}
        begin = 0
        for size in sizes:
            if size == 0:
                flats.append(torch.zeros_like(own))
                continue
            part = given.part(begin, size)
            begin += size
            if compiled:
                symbolic_rows(part)
            leaf = own.detach().requires_grad_()
            values, share, state = forward(leaf, resident, local, part)
            for h, value in enumerate(values.unbind()):
                flats += torch.autograd.grad(value, leaf, retain_graph=h < width - 1)
            total = total + share
        return flats, total, state

    return gradients


def symbolic_rows(given: PassInput) -> None:
    """Tell the compiler that the number of samples varies, so that no pass size costs a compile of its own."""
    for t in given:
        if t is not None:
            torch._dynamo.maybe_mark_dynamic(t, 0)


@lru_cache(maxsize=64)
def update_function(
    method: Method, compile: bool, kernels: bool = False
) -> Callable[[Local, Tensor, Sequence[Tensor] | Tensor], None]:
    """x <- x - lr (direction + weight_decay x), in place, with the step state and the compute copy of x.

    The same function for the same method, so that many runs in one process compile it once.
    """

    def update(local: Local, start: Tensor, grads: Sequence[Tensor] | Tensor) -> None:
        params, state, hyper = local.params, local.state, local.hyper
        g = grads.float() if isinstance(grads, Tensor) else torch.stack([v.float() for v in grads])
        step, new = method.direction(LocalStep(g, params, start, local.const, state, hyper))
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

    if not method.traits.group_momentum or not kernels:
        return plain
    trusted: list[bool] = []

    def by_kernel(local: Local, start: Tensor, grads: Sequence[Tensor] | Tensor) -> None:
        if not isinstance(grads, Tensor) or not has_kernel(local.params, grads) or trusted == [False]:
            plain(local, start, grads)
            return
        if not trusted:
            trusted.append(same_step(local, grads, lambda other: plain(other, start, grads)))
            by_kernel(local, start, grads)
            return
        momentum_step(local.params, local.shadow, local.state["momentum"], grads, local.hyper)

    return by_kernel


def same_step(local: Local, grads: Tensor, plain: Callable[[Local], None]) -> bool:
    """Whether the kernels of a momentum step run on this GPU and do what ``plain`` does: tried once, on copies."""
    mine, theirs = (
        local._replace(
            params=local.params.clone(),
            shadow=None if local.shadow is None else local.shadow.clone(),
            state={k: v.clone() for k, v in local.state.items()},
        )
        for _ in range(2)
    )
    try:
        momentum_step(mine.params, mine.shadow, mine.state["momentum"], grads, mine.hyper)
        float(mine.params[0])  # waits
    except Exception as error:  # a compiler that does not know the GPU, say
        warnings.warn(f"steps are left to the compiler: {type(error).__name__}: {error}", stacklevel=2)
        return False
    plain(theirs)
    moved = (theirs.params - local.params).norm().clamp_min(1e-30)
    apart = float((mine.params - theirs.params).norm() / moved)
    kept = float((mine.state["momentum"] - theirs.state["momentum"]).abs().max())
    if apart <= 1e-3 and kept <= 1e-3 * float(theirs.state["momentum"].abs().max() + 1e-30):
        return True
    warnings.warn(f"steps are left to the compiler: they differ by {apart:.1e} and {kept:.1e}", stacklevel=2)
    return False
