"""The device functions of the graph path: batch loss, update and logits, as pure functions of flat vectors.

They are compiled once with a symbolic batch size, so that every pass size, every client and every probe runs the same
code. The gradient comes back flat, because the parameters are cut out of one vector inside the compiled function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtail.core.errors import FedtailError, one_of
from fedtail.core.records import Tensors
from fedtail.data.augment import apply_augment
from fedtail.data.federation import Transform
from fedtail.methods.base import Batch, Method

PRECISIONS = ("auto", "bf16", "tf32", "fp32")


@dataclass(frozen=True)
class Numerics:
    """How arithmetic is done on the device. Master weights, gradients and updates are float32 in every mode."""

    device: torch.device
    precision: str
    """``bf16``: autocast; ``tf32`` / ``fp32``: float32 with and without TF32 matrix units."""
    compile: bool
    channels_last: bool

    @classmethod
    def choose(
        cls, module: nn.Module, device: torch.device, precision: str = "auto", compile: bool | None = None
    ) -> Numerics:
        """Defaults: bf16 and compiled on CUDA, fp32 and not compiled on the CPU; recurrent layers are never
        compiled (the compiler leaves them out), a recorded graph holds them all the same."""
        if precision not in PRECISIONS:
            raise one_of("engine.precision", precision, PRECISIONS)
        cuda = device.type == "cuda"
        if precision == "auto":
            precision = "bf16" if cuda else "fp32"
        if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
            raise FedtailError("engine.precision = 'bf16' is not supported by this GPU; use 'tf32' or 'fp32'")
        recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
        wanted = cuda if compile is None else compile
        images = any(isinstance(m, nn.Conv2d) for m in module.modules())
        return cls(device, precision, wanted and not recurrent, cuda and images and precision != "fp32")

    def apply(self) -> None:
        """Set the process-wide switches that PyTorch has for this."""
        if self.device.type == "cuda":
            tf32 = self.precision != "fp32"
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32


def prepare_inputs(transform: Transform, device: torch.device, input_ndim: int) -> Callable[..., Tensor]:
    """(pool, index, draws) -> model input. Equal to ``Transform`` and ``apply_augment``, with the constants already on
    the device: a recorded graph cannot copy from the host."""
    shape = (len(transform.mean),) + (1,) * (input_ndim - 1)
    mean = torch.tensor(transform.mean, device=device).view(shape) if transform.mean else None
    std = torch.tensor(transform.std, device=device).view(shape) if transform.mean else None

    def inputs(pool: Tensor, index: Tensor, draws: Tensor | None) -> Tensor:
        x = pool[index]
        if draws is not None:
            x = apply_augment(x, draws)
        out = x.to(torch.float32)
        if transform.scale != 1.0:
            out = out * transform.scale
        return out if mean is None or std is None else (out - mean) / std

    return inputs


def model_function(
    module: nn.Module, numerics: Numerics, *, training: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(params (d,), rest (n - d,), x) -> float32 logits, with the layout of ``FlatModel``."""
    skeleton = copy.deepcopy(module).to(numerics.device).train(training)
    trained = [(n, tuple(p.shape)) for n, p in skeleton.named_parameters() if p.requires_grad]
    others = [(n, tuple(p.shape)) for n, p in skeleton.named_parameters() if not p.requires_grad]
    others += [(n, tuple(b.shape)) for n, b in skeleton.named_buffers() if b.is_floating_point()]
    trained_sizes, other_sizes = ([torch.Size(s).numel() for _, s in part] for part in (trained, others))
    bf16 = numerics.precision == "bf16"
    images = numerics.channels_last

    def shaped(part: Tensor, shape: tuple[int, ...]) -> Tensor:
        out = part.view(shape)
        return out.contiguous(memory_format=torch.channels_last) if images and len(shape) == 4 else out

    def logits(params: Tensor, rest: Tensor, x: Tensor) -> Tensor:
        tensors = {n: shaped(p, s) for (n, s), p in zip(trained, params.split(trained_sizes), strict=True)}
        if others:
            tensors |= {n: p.view(s) for (n, s), p in zip(others, rest.split(other_sizes), strict=True)}
        if images and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(numerics.device.type, torch.bfloat16, enabled=bf16):
            out = functional_call(skeleton, tensors, (x,))
        return out.float()

    return logits


def loss_function(
    module: nn.Module, method: Method, inputs: Callable[..., Tensor], numerics: Numerics, width: int
) -> Callable[..., tuple[Tensor, Tensor, Tensors]]:
    """The forward half of a pass: scaled loss sums (W,), the plain loss sum, and the step state."""
    student = model_function(module, numerics, training=True)
    teacher = model_function(module, numerics, training=False) if method.needs_teacher else None

    def loss(
        params: Tensor,
        rest: Tensor,
        start: Tensor,
        pool_x: Tensor,
        pool_y: Tensor,
        rows: Tensor,
        draws: Tensor | None,
        scale: Tensor,
        groups: Tensor,
        const: Tensors,
        state: Tensors,
    ) -> tuple[Tensor, Tensor, Tensors]:
        real = rows >= 0
        index = torch.where(real, rows, -rows - 1)
        x, y = inputs(pool_x, index, draws), pool_y[index]
        guide = None
        if teacher is not None:
            with torch.no_grad():
                guide = teacher(start[: params.numel()], start[params.numel() :], x)
        batch = Batch(y, real.to(torch.float32), guide)
        losses, state = method.loss(student(params, rest, x), batch, const, state)
        losses = torch.where(real, losses, 0.0)
        total = losses.sum()
        if width == 1:
            return total * scale, total.detach(), state
        member = groups[y]
        sums = torch.stack([torch.where(member == h, losses, 0.0).sum() for h in range(width)])
        return sums * scale, total.detach(), state

    return torch.compile(loss) if numerics.compile else loss


def update_function(method: Method, numerics: Numerics) -> Callable[..., None]:
    """x <- x - lr (direction + weight_decay x), in place, with the step state."""

    def update(
        params: Tensor, start: Tensor, grads: Tensor, const: Tensors, state: Tensors, hyper: Mapping[str, Tensor]
    ) -> None:
        step, new = method.direction(grads, params, start, const, state, hyper)
        params.sub_(hyper["lr"] * (step + hyper["weight_decay"] * params))
        for name, value in new.items():
            if value is not state[name]:
                state[name].copy_(value)

    return torch.compile(update, dynamic=False) if numerics.compile else update


def logits_function(module: nn.Module, inputs: Callable[..., Tensor], numerics: Numerics) -> Callable[..., Tensor]:
    """(vector params, rest, pool, rows) -> logits in evaluation mode; negative rows are filling."""
    model = model_function(module, numerics, training=False)

    def logits(params: Tensor, rest: Tensor, pool_x: Tensor, rows: Tensor) -> Tensor:
        return model(params, rest, inputs(pool_x, torch.where(rows >= 0, rows, -rows - 1), None))

    return torch.compile(logits) if numerics.compile else logits


def symbolic_rows(*tensors: Any) -> None:
    """Tell the compiler that the first dimension varies, so that no pass size costs a compile of its own."""
    for t in tensors:
        if t is not None:
            torch._dynamo.mark_dynamic(t, 0)
