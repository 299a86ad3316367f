"""Convolutional models on a CPU: a few images at a time, all the way forward and back.

One such model fills a core, so that nothing is gained by running several in one operation. What a plain loop loses is
memory: a batch's activations do not fit the cache, and every layer takes fresh pages for them. Samples do not influence
each other, so a batch is cut into chunks of one group's samples that fit. A chunk is run forward, its loss taken, and
run back, channels last, before the next begins; group gradients are the chunks' sums, and padding is never computed.
Chunks of all runs of a step are shared by the workers. Their sums are taken in a fixed order, so the bits do not depend
on who computed them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtail.simulate.batched.layers import add_into

T = TypeVar("T")
R = TypeVar("R")
Spread = Callable[[Callable[[int, T], R], Sequence[T]], list[R]]
Pull = Callable[[int, slice, Tensor], tuple[Tensor, Tensor]]
"""(model, its samples, their (1, C, b) logits) -> (1, b) losses and their (1, C, b) gradient at the logits."""

CHUNK_BYTES = 2**22
"""Most memory of a chunk's largest activation."""


class Chunk(NamedTuple):
    """Samples of one group of one model: columns of its batch."""

    model: int
    group: int
    columns: slice


class ChunkedKernel:
    """A module in which samples do not influence each other, as a function of its flat parameters."""

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...], chunk: int | None = None) -> None:
        """``chunk``: samples in one (default: what fits the cache)."""
        self.module = copy.deepcopy(module).train()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.chunk = chunk or max(1, CHUNK_BYTES // max(4 * _widest(self.module, input_shape), 1))
        self.spread: Spread[Any, Any] = lambda work, pieces: [work(0, piece) for piece in pieces]
        """How chunks are shared; the simulator sets it."""
        self._own = threading.local()

    def __deepcopy__(self, memo: Any) -> ChunkedKernel:
        """Any thread may use it, since each has a module of its own."""
        return self

    def answers(self, x: Tensor, inputs: Tensor, *, training: bool = False) -> Tensor:
        """(n, C, B) logits of models (n, d) on inputs (n, B, ...)."""
        models = [self._named(row) for row in x]
        chunks = [c for i in range(len(x)) for c in self._cut(i, 0, 0, inputs.shape[1])]
        each = self.spread(lambda _, c: self._logits(models[c.model], inputs[c.model, c.columns], training), chunks)
        return torch.cat(each).view(len(x), inputs.shape[1], -1).transpose(1, 2)

    def gradients(
        self, x: Tensor, inputs: Tensor, member: Tensor, weights: Tensor, pull: Pull, into: Tensor, keep: float | Tensor
    ) -> Tensor:
        """``into`` (n, H, d) becomes keep * into + group gradients; returns (n, B) losses, 0 for padding.

        member: (n, B) group of each sample, -1 for padding; weights: (n, H, B) what it counts in its group's gradient.
        """
        models = [{name: p.requires_grad_() for name, p in self._named(row.detach()).items()} for row in x]
        chunks = [c for i, row in enumerate(member.numpy()) for c in self._chunks(i, row)]

        def work(worker: int, c: Chunk) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                logits = self._logits(models[c.model], inputs[c.model, c.columns], True)
                loss, d = pull(c.model, c.columns, logits.detach().T.unsqueeze(0))
                d = d[0].T * weights[c.model, c.group, c.columns].unsqueeze(-1)
                grads = torch.autograd.grad(logits, list(models[c.model].values()), d)
            return loss[0], torch.cat([g.reshape(-1) for g in grads])

        losses, total = inputs.new_zeros(member.shape), torch.zeros_like(into)
        for c, (loss, grads) in zip(chunks, self.spread(work, chunks), strict=True):
            losses[c.model, c.columns] = loss
            total[c.model, c.group] += grads
        add_into(into, total, keep)
        return losses

    def _chunks(self, model: int, member: np.ndarray) -> list[Chunk]:
        """Return one model's runs of columns of one group, cut to size."""
        edges = [0, *(np.flatnonzero(np.diff(member)) + 1).tolist(), len(member)]
        runs = [(int(member[a]), a, b) for a, b in pairwise(edges) if member[a] >= 0]
        return [c for h, a, b in runs for c in self._cut(model, h, a, b)]

    def _cut(self, model: int, group: int, begin: int, end: int) -> list[Chunk]:
        """Columns in equal chunks."""
        count = -(-(end - begin) // self.chunk)
        edges = [begin + (end - begin) * i // count for i in range(count + 1)]
        return [Chunk(model, group, slice(a, b)) for a, b in pairwise(edges)]

    def _logits(self, params: dict[str, Tensor], inputs: Tensor, training: bool) -> Tensor:
        """(b, C) of one model."""
        if not hasattr(self._own, "module"):  # a module cannot be called with two models at once
            self._own.module = copy.deepcopy(self.module)
        given = inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs
        out: Tensor = functional_call(self._own.module.train(training), params, (given,))
        return out

    def _named(self, x: Tensor) -> dict[str, Tensor]:
        """One model's parameters (d,) by name; filters channels last."""
        parts = x.split([s.numel() for s in self.shapes.values()])
        named = {name: part.view(s) for (name, s), part in zip(self.shapes.items(), parts, strict=True)}
        return {n: p.contiguous(memory_format=torch.channels_last) if p.ndim == 4 else p for n, p in named.items()}


def _widest(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Values of the largest activation of one sample."""
    sizes = [0]
    hooks = [m.register_forward_hook(lambda m, given, out: sizes.append(out.numel())) for m in module.modules()]
    with torch.no_grad():
        module(torch.zeros(1, *input_shape))
    for hook in hooks:
        hook.remove()
    return max(sizes)
