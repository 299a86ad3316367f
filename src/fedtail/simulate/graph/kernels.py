"""The device functions of the graph path: group gradients, update and logits, as functions of flat vectors.

Two ways to run a network. ``fused`` (see ``fused.py``): our own GroupNorm kernels and cuDNN, no compiler, one backward
pass for all groups. ``plain``: the module as it is, compiled with a symbolic batch size where that is possible,
one pass per group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtail.core.records import Tensors
from fedtail.data.federation import Transform
from fedtail.data.images.augment import apply_augment
from fedtail.errors import FedtailError, one_of
from fedtail.methods.base import Batch, LocalStep, Method
from fedtail.models.flat import has_batchnorm
from fedtail.simulate.graph.fused import Unsupported, fused_network

PRECISIONS = ("auto", "bf16", "tf32", "fp32")
COMPILER: dict[str, Any] = {"force_layout_optimization": True, "shape_padding": False}
"""Keep channels-last with a symbolic batch size, and do not tie the code to ranges of it."""

Inputs = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Gradients = Callable[..., tuple[Sequence[Tensor] | Tensor, Tensor, Tensors]]
Weights = Tensor | dict[str, Tensor]
"""Parameters as a flat vector or by name."""


@dataclass(frozen=True)
class Numerics:
    """How arithmetic is done on the device. Master weights, momenta and updates are float32 in every mode."""

    device: torch.device
    precision: str
    """``bf16``: weights, activations and their gradients in bfloat16; ``tf32`` / ``fp32``: in float32, matrix
    products with and without TF32."""
    fused: bool
    compile: bool
    """Compile the update and, unless ``fused``, the network."""

    @classmethod
    def choose(
        cls,
        module: nn.Module,
        device: torch.device,
        precision: str = "auto",
        fused: bool | None = None,
        compile: bool | None = None,
    ) -> Numerics:
        """Defaults: bf16 and compiled on CUDA, float32 and not compiled on the CPU; fused wherever the network
        allows it."""
        if precision not in PRECISIONS:
            raise one_of("engine.precision", precision, PRECISIONS)
        cuda = device.type == "cuda"
        if precision == "auto":
            precision = "bf16" if cuda else "fp32"
        if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
            raise FedtailError("engine.precision = 'bf16' is not supported by this GPU; use 'tf32' or 'fp32'")
        if fused is None or fused:
            try:
                fused_network(module)
                fused = True
            except Unsupported as error:
                if fused:
                    raise FedtailError(f"this model cannot be fused: {error}") from error
                fused = False
        return cls(device, precision, fused, cuda if compile is None else compile)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def apply(self) -> None:
        """Set the process-wide switches that PyTorch has for this."""
        if self.device.type == "cuda":
            tf32 = self.precision != "fp32"
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32


class Layout:
    """Order of the parameters on the device: convolution weights channels-last when fused, so that no pass has to
    rearrange them. Norms and all other things that methods compute do not depend on the order."""

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        self.names = [(n, tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad]
        self.sizes = [torch.Size(s).numel() for _, s in self.names]
        self.n_params = sum(self.sizes)
        self.permuted = numerics.fused and any(len(s) == 4 for _, s in self.names)
        if self.permuted:
            parts, offset = [], 0
            for (_, shape), n in zip(self.names, self.sizes, strict=True):
                index = torch.arange(offset, offset + n)
                if len(shape) == 4:
                    index = index.view(shape).permute(0, 2, 3, 1).reshape(-1)
                parts.append(index)
                offset += n
            self.order = torch.cat(parts).to(numerics.device)
            self.inverse = torch.empty_like(self.order)
            self.inverse[self.order] = torch.arange(self.n_params, device=numerics.device)

    def inward(self, t: Tensor) -> Tensor:
        """Parameters (..., d) as the server has them -> as the device has them; other tensors as they are."""
        return t.index_select(-1, self.order) if self._mine(t) else t

    def outward(self, t: Tensor) -> Tensor:
        return t.index_select(-1, self.inverse) if self._mine(t) else t

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the parameters by name; 4-d ones channels-last when permuted."""
        out = {}
        for (name, s), part in zip(self.names, flat.split(self.sizes), strict=True):
            if self.permuted and len(s) == 4:
                out[name] = part.view(s[0], s[2], s[3], s[1]).permute(0, 3, 1, 2)
            else:
                out[name] = part.view(s)
        return out

    def _mine(self, t: Tensor) -> bool:
        return self.permuted and t.ndim > 0 and t.shape[-1] == self.n_params


def prepare_inputs(transform: Transform, device: torch.device, input_ndim: int) -> Inputs:
    """(pool, index, draws) -> model input. Equal to ``Transform`` and ``apply_augment``, with the constants already on
    the device: a recorded graph cannot copy from the host."""
    shape = (len(transform.mean),) + (1,) * (input_ndim - 1)
    mean = torch.tensor(transform.mean, device=device).view(shape) if transform.mean else None
    std = torch.tensor(transform.std, device=device).view(shape) if transform.mean else None

    def inputs(pool: Tensor, index: Tensor, draws: Tensor | None) -> Tensor:
        out = pool[index].to(torch.float32)
        if transform.scale != 1.0:
            out = out * transform.scale
        if mean is not None and std is not None:
            out = (out - mean) / std
        return out if draws is None else apply_augment(out, draws)

    return inputs


def network_function(
    module: nn.Module, layout: Layout, numerics: Numerics, *, training: bool
) -> Callable[[Sequence[Weights], Tensor, Tensor, tuple[int, ...]], Tensor]:
    """(flat parameters per group, rest, x, rows per group) -> float32 logits. ``plain`` networks take one group."""
    skeleton = copy.deepcopy(module).to(numerics.device).train(training)
    images = any(isinstance(m, nn.Conv2d) for m in skeleton.modules()) and numerics.device.type == "cuda"
    if numerics.fused:
        run = fused_network(skeleton)

        def fused(params: Sequence[Weights], rest: Tensor, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
            x = x.to(numerics.dtype)
            if images and x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            return run([p if isinstance(p, dict) else layout.named(p) for p in params], x, sizes).float()

        return fused

    others = [(n, tuple(p.shape)) for n, p in skeleton.named_parameters() if not p.requires_grad]
    others += [(n, tuple(b.shape)) for n, b in skeleton.named_buffers() if b.is_floating_point()]
    other_sizes = [torch.Size(s).numel() for _, s in others]

    def shaped(w: Tensor) -> Tensor:
        return w.contiguous(memory_format=torch.channels_last) if images and w.ndim == 4 else w

    def plain(params: Sequence[Weights], rest: Tensor, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        given = params[0] if isinstance(params[0], dict) else layout.named(params[0])
        tensors = {n: shaped(w) for n, w in given.items()}
        if others:
            tensors |= {n: p.view(s) for (n, s), p in zip(others, rest.split(other_sizes), strict=True)}
        with torch.autocast(numerics.device.type, torch.bfloat16, enabled=numerics.precision == "bf16"):
            return functional_call(skeleton, tensors, (shaped(x),)).float()

    return plain


def gradient_function(
    module: nn.Module, method: Method, inputs: Inputs, layout: Layout, numerics: Numerics, mode: str, n_groups: int
) -> Gradients:
    """A pass: flat gradients (H, d) of its groups, its share of the step's loss, and the step state."""
    student = network_function(module, layout, numerics, training=True)
    teacher = network_function(module, layout, numerics, training=False) if method.needs_teacher else None

    def losses(
        params: Sequence[Weights], rest: Tensor, start: Tensor, pool_x: Tensor, pool_y: Tensor, rows: Tensor,
        draws: Tensor | None, sizes: tuple[int, ...], const: Tensors, state: Tensors,
    ) -> tuple[Tensor, Tensor, Tensors]:  # fmt: skip
        real = rows >= 0
        index = torch.where(real, rows, -rows - 1)
        x, y = inputs(pool_x, index, draws), pool_y[index]
        guide = None
        if teacher is not None:
            with torch.no_grad():
                d = layout.n_params
                dtype = numerics.dtype if numerics.fused else torch.float32
                guide = teacher([start[:d].to(dtype)] * len(sizes), start[d:], x, sizes)
        batch = Batch(y, real.to(torch.float32), guide)
        out, state = method.loss(student(params, rest, x, sizes), batch, const, state)
        return torch.where(real, out, 0.0), y, state

    def fused(
        shadow: Tensor, rest: Tensor, start: Tensor, pool_x: Tensor, pool_y: Tensor, rows: Tensor,
        draws: Tensor | None, scales: Tensor, shares: Tensor, sizes: tuple[int, ...], groups: Tensor,
        const: Tensors, state: Tensors,
    ) -> tuple[Tensor, Tensor, Tensors]:  # fmt: skip
        named = [{n: w.detach().requires_grad_() for n, w in layout.named(shadow).items()} for _ in sizes]
        out, _, state = losses(named, rest, start, pool_x, pool_y, rows, draws, sizes, const, state)
        leaves = [w for group in named for w in group.values()]
        grads = torch.autograd.grad((out * scales).sum(), leaves)
        flat = torch.empty(len(sizes), shadow.numel(), dtype=shadow.dtype, device=shadow.device)
        # one balanced kernel; concatenation is bound by the largest of the many pieces
        torch._foreach_copy_([w for row in flat for w in layout.named(row).values()], grads)
        return flat, (out.detach() * shares).sum(), state

    if numerics.fused and mode != "masked":
        return fused

    width = n_groups if mode == "masked" else 1

    def sums(
        leaf: Tensor, rest: Tensor, start: Tensor, pool_x: Tensor, pool_y: Tensor, rows: Tensor,
        draws: Tensor | None, scales: Tensor, shares: Tensor, groups: Tensor, const: Tensors, state: Tensors,
    ) -> tuple[Tensor, Tensor, Tensors]:  # fmt: skip
        out, y, state = losses([leaf], rest, start, pool_x, pool_y, rows, draws, (rows.shape[0],), const, state)
        share = (out.detach() * shares).sum()
        if width == 1:
            return (out * scales).sum().reshape(1), share, state
        member = groups[y]
        parts = [torch.where(member == h, out * scales, 0.0).sum() for h in range(width)]
        return torch.stack(parts), share, state

    recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
    compiled = numerics.compile and not recurrent and not numerics.fused  # the compiler leaves recurrent layers out
    forward: Callable[..., Any] = torch.compile(sums, options=COMPILER) if compiled else sums

    def plain(
        shadow: Tensor, rest: Tensor, start: Tensor, pool_x: Tensor, pool_y: Tensor, rows: Tensor,
        draws: Tensor | None, scales: Tensor, shares: Tensor, sizes: tuple[int, ...], groups: Tensor,
        const: Tensors, state: Tensors,
    ) -> tuple[Sequence[Tensor], Tensor, Tensors]:  # fmt: skip
        flats: list[Tensor] = []
        total = torch.zeros((), device=shadow.device)
        begin = 0
        for size in sizes:
            here = slice(begin, begin + size)
            begin += size
            if size == 0:
                flats.append(torch.zeros_like(shadow))
                continue
            part: list[Any] = [None if t is None else t[here].clone() for t in (rows, draws, scales, shares)]
            if compiled:
                symbolic_rows(*part)
            leaf = shadow.detach().requires_grad_()
            values, share, state = forward(leaf, rest, start, pool_x, pool_y, *part, groups, const, state)
            for h, value in enumerate(values.unbind()):
                flats += torch.autograd.grad(value, leaf, retain_graph=h < width - 1)
            total = total + share
        return flats, total, state

    return plain


@lru_cache(maxsize=64)
def update_function(method: Method, compile: bool) -> Callable[..., None]:
    """x <- x - lr (direction + weight_decay x), in place, with the step state and the compute copy of x.

    The same function for the same method, so that many runs in one process compile it once.
    """

    def update(
        params: Tensor, start: Tensor, shadow: Tensor | None, grads: Sequence[Tensor] | Tensor, const: Tensors,
        state: Tensors, hyper: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        g = grads.float() if isinstance(grads, Tensor) else torch.stack([v.float() for v in grads])
        step, new = method.direction(LocalStep(g, params, start, const, state, hyper))
        params.sub_(hyper["lr"] * (step + hyper["weight_decay"] * params))
        for name, value in new.items():
            if value is not state[name]:
                state[name].copy_(value)
        if shadow is not None:
            shadow.copy_(params)

    if not compile:
        return update
    # one code object serves all methods; past its limit of variants the compiler would silently give up on it
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), 1024))
    return torch.compile(update, dynamic=False)


def logits_function(
    module: nn.Module, inputs: Inputs, layout: Layout, numerics: Numerics
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(parameters, rest, pool, rows) -> logits in evaluation mode."""
    network = network_function(module, layout, numerics, training=False)

    def logits(params: Tensor, rest: Tensor, pool_x: Tensor, rows: Tensor) -> Tensor:
        return network([params], rest, inputs(pool_x, rows, None), (rows.shape[0],))

    return logits


def choose_mode(module: nn.Module, method: Method, n_groups: int) -> str:
    """How a step of this method on this model gets its gradients; see ``passes.MODES``."""
    if n_groups > 1 and (method.stateful_loss or has_batchnorm(module)):
        return "masked"
    return "joint" if n_groups <= 2 else "single"


def symbolic_rows(*tensors: Any) -> None:
    """Tell the compiler that the first dimension varies, so that no pass size costs a compile of its own."""
    for t in tensors:
        if t is not None:
            torch._dynamo.maybe_mark_dynamic(t, 0)
