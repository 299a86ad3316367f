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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import islice, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtail.simulate.batched.layers import LARGE, add_into
from fedtail.simulate.reference import draws_numbers

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


class Viewed(TorchFunctionMode):
    """Inside, ``view`` takes images in any memory format, as models expect that were written for contiguous ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.reshape if func is Tensor.view and args[0].ndim == 4 else func
        return func(*args, **(kwargs or {}))


class ChannelsLast(Viewed):
    """Inside, some of torch's functions take the way that is quick for a few images, channels last.

    Dropout draws from ``generator``, so that threads do not share torch's own: the masks that torch's own generator
    with the same seed gives.
    """

    def __init__(self, params: Mapping[str, Tensor] = MappingProxyType({}), generator: torch.Generator | None = None):
        super().__init__()
        self.generator = generator
        self.products: dict[int, list[Product]] = {id(p): [] for p in params.values() if p.numel() >= LARGE}
        """The gradients of large dense weights as products, by weight: no memory is written for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            func = self._linear
        elif func is F.dropout and self.generator is not None:
            func = self._dropped
        elif func in RESHAPES and args[0].ndim == 4 and args[0].requires_grad:
            args[0].register_hook(_last)  # where gradients come back as images
        return super().__torch_function__(func, types, args, kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products = self.products.get(id(weight))
        if products is None or bias is None or x.ndim != 2:
            return F.linear(x, weight, bias)
        out: Tensor = _Dense.apply(x, weight, bias, products)
        return out

    def _dropped(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        mask = torch.empty(x.shape).bernoulli_(1.0 - p, generator=self.generator).div_(1.0 - p or 1.0)
        mask = _last(mask) if x.ndim == 4 else mask
        return x.mul_(mask) if inplace else x * mask


RESHAPES = {torch.flatten, torch.reshape, Tensor.flatten, Tensor.reshape, Tensor.view}
Product = tuple[Tensor, Tensor]
Terms = tuple[Tensor | None, list[Product]]
"""A parameter's gradient, and what is to be added to it."""


class _Dense(torch.autograd.Function):
    """A dense layer, whose weight's gradient is left as the product that it is: (B, out) and (B, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, products: list[Product]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return torch.addmm(bias.unsqueeze(1), weight, x.T).T  # for few samples twice as fast as x @ weight.T

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.products.append((d, x))
        return d @ weight if ctx.needs_input_grad[0] else None, None, d.sum(0), None


def _take(each: Sequence[Terms], place: Tensor, keep: float | Tensor) -> None:
    """place <- keep * place + all terms."""
    sums, products = [g for g, _ in each if g is not None], [pair for _, pairs in each for pair in pairs]
    if sums or not products:
        add_into(place, reduce(torch.add, sums) if sums else place.new_zeros(()), keep)
        keep = 1.0
    elif isinstance(keep, Tensor):
        place.mul_(keep)
        keep = 1.0
    for d, x in products:
        place.addmm_(d.T, x, beta=keep)
        keep = 1.0


def _last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


class ChunkedKernel:
    """A module in which samples do not influence each other, as a function of its flat parameters."""

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...], chunk: int | None = None) -> None:
        """``chunk``: samples in one (default: what fits the cache)."""
        self.module = copy.deepcopy(module)
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.draws = draws_numbers(module, input_shape)
        """Whether it has dropout, whose masks are drawn for all samples of a group at once."""
        self.chunk = chunk or max(1, CHUNK_BYTES // max(4 * _widest(self.module.eval(), input_shape), 1))
        self.spread: Spread[Any, Any] = lambda work, pieces: [work(0, piece) for piece in pieces]
        self.workers = 1
        """How chunks are shared, and by how many; the simulator sets it."""
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

    def seed(self, seeds: Sequence[int]) -> None:
        """Where each model's dropout begins to draw; this thread takes the steps."""
        self._own.generators = [torch.Generator().manual_seed(seed) for seed in seeds] if self.draws else None

    def gradients(
        self, x: Tensor, inputs: Tensor, member: Tensor, weights: Tensor, pull: Pull, into: Tensor, keep: float | Tensor
    ) -> Tensor:
        """``into`` (n, H, d) becomes keep * into + group gradients; returns (n, B) losses, 0 for padding.

        member: (n, B) group of each sample, -1 for padding; weights: (n, H, B) what it counts in its group's gradient.
        """
        # ``data``: autograd need not mind that a model moves while others' gradients are taken
        models = [{name: p.requires_grad_() for name, p in self._named(row).items()} for row in x.data]
        cut = [self._chunks(i, row) for i, row in enumerate(member.numpy())]
        generators, losses = getattr(self._own, "generators", None), inputs.new_zeros(member.shape)

        def computed(c: Chunk) -> list[Terms]:
            params = models[c.model]
            with torch.enable_grad():
                quick = ChannelsLast(params, generators[c.model] if generators else None)
                logits = self._logits(params, inputs[c.model, c.columns], True, quick)
                loss, d = pull(c.model, c.columns, logits.detach().T.unsqueeze(0))
                d = d[0].T * weights[c.model, c.group, c.columns].unsqueeze(-1)
                grads = torch.autograd.grad(logits, list(params.values()), d, allow_unused=True)
            losses[c.model, c.columns] = loss[0]
            return [(g, quick.products.get(id(p), [])) for g, p in zip(grads, params.values(), strict=True)]

        def add(i: int, each: Iterable[list[Terms]]) -> None:
            done = list(zip(cut[i], each, strict=True))
            for h, place in enumerate(into[i]):
                own = [terms for c, terms in done if c.group == h]
                for j, part in enumerate(self._parts(place).values()):
                    _take([terms[j] for terms in own], part, keep[i].squeeze(0) if isinstance(keep, Tensor) else keep)

        if generators or len(x) >= self.workers:  # a model's step at once, while its memory is at hand
            self.spread(lambda _, i: add(i, map(computed, cut[i])), [i for i in range(len(x)) if cut[i]])
        else:
            done = iter(self.spread(lambda _, c: computed(c), [c for own in cut for c in own]))
            for i, own in enumerate(cut):
                add(i, islice(done, len(own)))
        return losses

    def _chunks(self, model: int, member: np.ndarray) -> list[Chunk]:
        """Return one model's runs of columns of one group, cut to size."""
        edges = [0, *(np.flatnonzero(np.diff(member)) + 1).tolist(), len(member)]
        runs = [(int(member[a]), a, b) for a, b in pairwise(edges) if member[a] >= 0]
        return [c for h, a, b in runs for c in self._cut(model, h, a, b)]

    def _cut(self, model: int, group: int, begin: int, end: int) -> list[Chunk]:
        """Columns in equal chunks."""
        count = 1 if self.draws else -(-(end - begin) // self.chunk)
        edges = [begin + (end - begin) * i // count for i in range(count + 1)]
        return [Chunk(model, group, slice(a, b)) for a, b in pairwise(edges)]

    def _logits(
        self, params: dict[str, Tensor], inputs: Tensor, training: bool, quick: ChannelsLast | None = None
    ) -> Tensor:
        """(b, C) of one model."""
        if not hasattr(self._own, "module"):  # a module cannot be called with two models at once
            self._own.module = copy.deepcopy(self.module)
        given = self._last(inputs) if inputs.ndim == 4 else inputs
        with quick or ChannelsLast():
            out: Tensor = functional_call(self._own.module.train(training), params, (given,))
        return out

    def _named(self, x: Tensor) -> dict[str, Tensor]:
        """One model's parameters (d,) by name; filters channels last."""
        named = self._parts(x)
        return {n: self._last(p) if p.ndim == 4 else p for n, p in named.items()}

    def _last(self, images: Tensor) -> Tensor:
        """Channels last. Of one channel only ``to`` changes the order, which is quicker but gives other bits: those of
        models without dropout stay what they were in version 0.3."""
        return images.to(memory_format=torch.channels_last) if self.draws else _last(images)

    def _parts(self, x: Tensor) -> dict[str, Tensor]:
        """Views of (d,), by name."""
        parts = x.split([s.numel() for s in self.shapes.values()])
        return {name: part.view(s) for (name, s), part in zip(self.shapes.items(), parts, strict=True)}


def _widest(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Values of the largest activation of one sample."""
    sizes = [0]
    hooks = [m.register_forward_hook(lambda m, given, out: sizes.append(out.numel())) for m in module.modules()]
    with torch.no_grad():
        module(torch.zeros(1, *input_shape))
    for hook in hooks:
        hook.remove()
    return max(sizes)
