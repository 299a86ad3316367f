"""One local step of many runs at once, as a pure function of tensors: it can be called or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtail.core.momentum import Scalar, like
from fedtail.core.records import Tensors
from fedtail.methods.base import Batch, LocalStep, Method
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.cohort import Span
from fedtail.simulate.batched.layers import Window


class Kernel(Protocol):
    """Forward and backward passes of n models, each on its own batch."""

    def forward(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """Logits (n, C, B) of models (n, d) on inputs (n, B, ...), and what ``backward`` needs."""
        ...

    def answers(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The logits of models that are not being trained."""
        ...

    def backward(
        self, saved: Any, d: Tensor, windows: Sequence[Window], masks: Tensor | None, into: Tensor, keep: float | Tensor
    ) -> None:
        """``into`` (n, H, d) becomes keep * into + group gradients, from the logits' gradient d (n, C, B).

        One group: ``d`` is weighted already, ``masks`` is None. More: masks (n, H, B) weigh each group's samples.
        ``keep`` is 0 where ``into`` has no contents, or (n, 1, 1). ``into`` may be the models themselves.
        """
        ...


AnyKernel = Kernel | ChunkedKernel


@dataclass(frozen=True)
class Signature:
    """Everything about a step that is not a tensor; equal signatures share a captured step."""

    columns: int
    windows: tuple[Span, ...]
    hyper: tuple[tuple[str, float], ...]
    """Hyper-parameters that are the same for all runs and rounds."""
    searched: tuple[str, ...]
    """Hyper-parameters that come as one value per run."""
    const: tuple[str, ...]
    state: tuple[str, ...]

    def same_runs(self, other: Signature) -> bool:
        """Whether steps differ in their batches alone, and not in what a run consists of."""
        return (self.searched, self.const, self.state) == (other.searched, other.const, other.state)


FIXED = ("x", "x0", "inputs", "y", "member", "share", "weight", "lr")
"""Tensors every step takes: (n, d) models, (1, d) global model, (n, B, ...) inputs, (n, B) classes, groups, shares and
weights of the samples (see ``Cohort``), (n, 1) learning rates."""


def input_names(signature: Signature) -> list[str]:
    """Names of the step's tensors, in order."""
    return [
        *FIXED,
        *(f"hyper.{k}" for k in signature.searched),
        *(f"const.{k}" for k in signature.const),
        *(f"state.{k}" for k in signature.state),
    ]


def make_step(kernel: AnyKernel, method: Method, signature: Signature) -> Callable[..., list[Tensor]]:
    """The step as a function of the tensors ``input_names`` lists; changes models and state in place.

    Returns [(n, B) loss of each sample].
    """
    names = input_names(signature)
    n_groups = len(signature.windows)

    def step(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(names, tensors, strict=True))
        x, x0 = given["x"], given["x0"].expand_as(given["x"])
        const = {k: given[f"const.{k}"] for k in signature.const}
        state = {k: given[f"state.{k}"] for k in signature.state}
        lr = given["lr"]
        hyper: dict[str, Scalar] = {
            **dict(signature.hyper),
            "lr": lr.squeeze(-1),
            **{k: given[f"hyper.{k}"] for k in signature.searched},
        }

        decay, beta = hyper["weight_decay"], hyper["beta"] if method.traits.averaged else lr
        decays = isinstance(decay, Tensor) or decay != 0.0
        # gradients go where they end up, if they are only added there: into the models or into the momentum
        plain = n_groups == 1 and not method.traits.own_direction
        factor: float | Tensor = 1.0
        keep: float | Tensor = 0.0
        if plain:
            into, factor = x.unsqueeze(1), -lr
            keep = (1.0 - lr * like(decay, x)).unsqueeze(-1) if decays else 1.0
        elif not isinstance(beta, Tensor):
            into, factor, keep = state[method.traits.averaged], 1.0 - beta, beta
        else:
            into = x.new_empty(len(x), n_groups, x.shape[-1])
        if n_groups == 1:
            weights = _scaled(given["share"], factor).unsqueeze(1)
        else:
            weights = _scaled(group_masks(given["member"], given["share"], n_groups), factor)
        losses, new = _gradients(kernel, method, signature.windows, given, const, state, weights, into, keep)
        if not plain and not isinstance(beta, Tensor):
            factors = method.average_factors(into, hyper) * -lr.unsqueeze(-1)
            if decays:
                x.mul_(1.0 - lr * like(decay, x))
            for h in range(n_groups):  # the direction itself is not written
                x.addcmul_(into[:, h], factors[:, h])
        elif not plain:
            direction, new = method.direction(LocalStep(into, x, x0, const, new, hyper))
            if decays:
                direction = direction + like(decay, x) * x
            x.addcmul_(direction, lr, value=-1.0)
        for key, value in state.items():
            if new[key] is not value:
                value.copy_(new[key])  # a captured step computes the new state in place
        return [losses]

    return step


def _scaled(weights: Tensor, factor: float | Tensor) -> Tensor:
    return weights * factor if isinstance(factor, Tensor) or factor != 1.0 else weights


def _batch(kernel: AnyKernel, method: Method, given: Tensors) -> Batch:
    """The batch, with what the round's global model says of it where the method needs that."""
    teacher = None
    if method.traits.needs_teacher:
        teacher = kernel.answers(given["x0"].expand_as(given["x"]), given["inputs"]).transpose(1, 2)
    return Batch(given["y"], given["weight"], teacher)


def _gradients(
    kernel: AnyKernel,
    method: Method,
    spans: Sequence[Span],
    given: Tensors,
    const: Tensors,
    state: Tensors,
    weights: Tensor,
    into: Tensor,
    keep: float | Tensor,
) -> tuple[Tensor, Tensors]:
    """``into`` becomes keep * into + group gradients; (n, B) losses and new state. weights: (n, H, B)."""
    x, inputs, new = given["x"], given["inputs"], state
    if not isinstance(kernel, ChunkedKernel):
        logits, saved = kernel.forward(x, inputs)
        one = len(spans) == 1
        share = weights.squeeze(1) if one else None
        losses, d, new = logit_gradient(method, logits, _batch(kernel, method, given), const, state, share)
        windows = [Window(a, b, weights[:, h : h + 1, a:b]) for h, (a, b) in enumerate(spans)]
        all_samples = [Window(0, d.shape[-1], None)]
        kernel.backward(saved, d, all_samples if one else windows, None if one else weights, into, keep)
        return losses, new
    if method.traits.whole:  # all logits before the first chunk is trained on
        logits = kernel.answers(x, inputs, training=True)
        all_losses, all_d, new = logit_gradient(method, logits, _batch(kernel, method, given), const, state, None)

    def pull(i: int, columns: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        row = slice(i, i + 1)
        if method.traits.whole:
            return all_losses[row, columns], all_d[row, :, columns]
        batch = Batch(given["y"][row, columns], given["weight"][row, columns])
        own, carried = ({k: v[row] for k, v in tensors.items()} for tensors in (const, state))
        return logit_gradient(method, logits, batch, own, carried, None)[:2]

    member = torch.where(given["weight"] > 0, given["member"], -1)
    return kernel.gradients(x, inputs, member, weights, pull, into, keep), new


def logit_gradient(
    method: Method, logits: Tensor, batch: Batch, const: Tensors, state: Tensors, share: Tensor | None
) -> tuple[Tensor, Tensor, Tensors]:
    """(..., B) losses, their gradient (..., C, B) at the logits (..., C, B), weighted by ``share`` if given; new state.

    A loss of a sample depends on its own logits only (and perhaps on the batch's labels), so this is all that differs
    between methods' losses.
    """
    if not method.traits.own_loss:  # plain cross-entropy: softmax minus one-hot
        log_p = torch.log_softmax(logits, -2)
        y = batch.y.unsqueeze(-2)
        losses = -log_p.gather(-2, y).squeeze(-2)
        d = log_p.exp().scatter_add_(-2, y, torch.full_like(y, -1, dtype=log_p.dtype))
        return losses, d if share is None else d.mul_(share.unsqueeze(-2)), state
    with torch.enable_grad():
        z = logits.transpose(-2, -1).contiguous().detach().requires_grad_()
        losses, state = method.loss(z, batch, const, state)
        weights = torch.ones_like(losses) if share is None else share
        (d,) = torch.autograd.grad(losses, z, weights)
    return losses.detach(), d.transpose(-2, -1).contiguous(), {k: v.detach() for k, v in state.items()}


def group_masks(member: Tensor, share: Tensor, n_groups: int) -> Tensor:
    """(n, H, B) what each sample counts in its group's gradient; 0 for other groups and padding."""
    inside = member.unsqueeze(1) == torch.arange(n_groups, device=member.device).view(1, -1, 1)
    return inside * share.unsqueeze(1)
