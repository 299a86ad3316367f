"""Layers of many models at once, with hand-derived backward passes, for models too small to fill a core.

Row i of the flat parameters (n, d) is one model (a client, or a client's probe); each model sees its own batch.
Activations are (n, features..., B): samples last, so that normalization and activations are contiguous over
samples and every matrix product is one batched GEMM. No step of ``backward`` mixes samples, so one pass serves
all H groups of classes; only the products that sum over samples into parameters are taken per group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
LARGE = 16384
"""Entries of a weight from which on its gradient is added up in place, model by model: one pass less over memory. For
smaller ones the calls would take longer than the pass."""


class Window(NamedTuple):
    """Where a group's samples lie in a batch sorted by group: columns ``low:high`` contain all of them."""

    low: int
    high: int
    mask: Tensor | None
    """(n, 1, high - low) weight of each sample, 0 outside the group; None if the gradient is weighted already."""


class Gradients:
    """Takes the gradients of a backward pass, layer by layer, into (n, H, d): it becomes keep * into + gradients.

    A step of a larger model has few passes over its memory to spare. With the models themselves as ``into`` (and -lr
    in the signal) a step of SGD is its matrix products alone; with the momentum, gradients need no memory.
    """

    def __init__(
        self,
        into: Tensor,
        keep: float | Tensor,
        windows: Sequence[Window],
        masks: Tensor | None,
        shapes: Sequence[Shape],
    ) -> None:
        """keep: 0 if ``into`` has no contents; a tensor (n, 1, 1) if models differ."""
        self.into, self.keep, self.windows, self.masks = into, keep, windows, masks
        ends = list(accumulate(math.prod(s) for s in shapes))
        self.spans = list(zip([0, *ends], ends, strict=False))
        self._sums: dict[int, Tensor] = {}

    def product(self, i: int, d: Tensor, a: Tensor) -> None:
        """Parameter i, per group: sum_s w_s d_s a_s^T. d: (n, out, B); a: (n, in, B)."""
        begin, end = self.spans[i]
        for h, part, inputs in self._of_groups(d, a):
            place = self.into[:, h, begin:end].view(len(d), d.shape[1], a.shape[1])
            if len(d) == 1 or end - begin >= LARGE:
                beta = self.keep
                if isinstance(beta, Tensor):
                    place.mul_(beta)
                    beta = 1.0
                place.baddbmm_(part, inputs.transpose(1, 2), beta=beta)
            else:
                add_into(place, torch.bmm(part, inputs.transpose(1, 2)), self.keep)

    def over_positions(self, i: int, d: Tensor, a: Tensor, reach: int = 0) -> None:
        """Parameter i (out, in, 1 + 2 reach), per group: the sum over samples and positions l of w_s d_l a_{l+r}^T for
        each r from -reach to reach. d: (n, out, L, B); a: (n, in, L, B)."""
        n, outputs, length, _ = d.shape
        begin, end = self.spans[i]
        for h, part, inputs in self._of_groups(d, a):
            products = []
            for r in range(-reach, reach + 1):
                here, there = part[:, :, max(-r, 0) : max(length - r, 0)], inputs[:, :, max(r, 0) : max(length + r, 0)]
                products.append(torch.bmm(here.flatten(2), there.flatten(2).transpose(1, 2)))
            value = torch.stack(products, -1).flatten(2) if reach else products[0]
            add_into(self.into[:, h, begin:end].view(n, outputs, -1), value, self.keep)

    def _of_groups(self, d: Tensor, a: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each group with its samples of d, as they count in its gradient, and of a."""
        for h, (low, high, mask) in enumerate(self.windows):
            part, inputs = d, a
            if high - low < d.shape[-1]:
                part, inputs = d[..., low:high], a[..., low:high]
            if mask is not None:
                part = part * mask.view(len(mask), *(1,) * (d.ndim - 2), -1)
            yield h, part, inputs

    def sums(self, i: int, terms: Tensor) -> None:
        """Parameter i, per group: the sum over samples of (n, features, B)."""
        self._sums[i] = terms

    def finish(self) -> None:
        """All sums over samples in one go, written at once where parameters follow each other."""
        given, n = sorted(self._sums), len(self.into)
        if not given:
            return
        rows = torch.cat([self._sums[i] for i in given], 1)
        if self.masks is None:
            sums = torch.bmm(_constant(n, 1, rows.shape[-1], 1.0), rows.transpose(1, 2))
        else:
            sums = torch.bmm(self.masks, rows.transpose(1, 2))
        column = 0
        for _, run in groupby(enumerate(given), key=lambda pair: pair[1] - pair[0]):
            numbers = [i for _, i in run]
            begin, end = self.spans[numbers[0]][0], self.spans[numbers[-1]][1]
            add_into(self.into[..., begin:end], sums[..., column : column + end - begin], self.keep)
            column += end - begin


def add_into(place: Tensor, value: Tensor, keep: float | Tensor) -> None:
    """place <- keep * place + value."""
    if isinstance(keep, Tensor):
        place.mul_(keep).add_(value)
    elif keep == 1.0:
        place.add_(value)
    elif keep:
        torch.add(value, place, alpha=keep, out=place)
    else:
        place.copy_(value)


class Layer(Protocol):
    """One layer for n models. ``p`` are its parameters, (n, ...) views; ``a`` its input."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Its parameters' shapes, in the module's order."""
        ...

    @property
    def out(self) -> Shape:
        """Shape of one output sample."""
        ...

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]: ...

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        """Gradient of the input (anything, if ``first``); those of the parameters go to ``out``, from number ``at`` on.
        The parameters may change by that."""
        ...


@dataclass(frozen=True)
class Linear:
    inputs: int
    outputs: int
    bias: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        weight = (self.outputs, self.inputs)
        return (weight, (self.outputs,)) if self.bias else (weight,)

    @property
    def out(self) -> Shape:
        return (self.outputs,)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        z = torch.baddbmm(p[1].unsqueeze(-1), p[0], a) if self.bias else torch.bmm(p[0], a)
        return z, a

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        inner = d if first else torch.bmm(p[0].transpose(1, 2), d)
        out.product(at, d, saved)
        if self.bias:
            out.sums(at + 1, d)
        return inner


@dataclass(frozen=True)
class GroupNorm:
    groups: int
    channels: int
    out: Shape
    eps: float
    affine: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ((self.channels,), (self.channels,)) if self.affine else ()

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        z = a if self.groups == 1 and a.ndim == 3 else a.reshape(a.shape[0] * self.groups, -1, a.shape[-1])
        z = z - _mean(z)
        scale = _mean(z * z, self.eps).rsqrt_()
        z.mul_(scale)
        normal = z if z.shape == a.shape else z.view(a.shape)
        if not self.affine:
            return normal, (normal, scale)
        y = normal * _column(p[0], a)
        return y.add_(_column(p[1], a)), (normal, scale)

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        normal, scale = saved
        product = d * normal
        flat = (d.shape[0] * self.groups, -1, d.shape[-1])
        if self.affine:
            out.sums(at, _channel_sums(product))
            out.sums(at + 1, _channel_sums(d))
            row = self._row(p[0], flat[0])  # sums of gamma d, of gamma d times normal: products with gamma
            d, product, part = d.reshape(flat), product.reshape(flat), -self.groups / math.prod(self.out)
            total, slope = torch.baddbmm(scale, row, d, beta=0.0, alpha=part), torch.bmm(row, product)
            inner = torch.addcmul(total, d, row.transpose(1, 2))
        else:
            d, part = d.reshape(flat), -1.0
            inner, slope = d - _mean(d), _mean(product.reshape(flat))
        inner.addcmul_(normal.view(flat), slope, value=part).mul_(scale)
        return inner.view(normal.shape)

    def _row(self, gamma: Tensor, rows: int) -> Tensor:
        """(n G, 1, R): gamma of each of a group's R values."""
        positions = math.prod(self.out[1:])
        if positions > 1:
            gamma = gamma.unsqueeze(-1).expand(*gamma.shape, positions)
        return gamma.reshape(rows, 1, -1)


def _column(p: Tensor, like: Tensor) -> Tensor:
    """Per-channel parameters (n, C), shaped to broadcast over positions and samples."""
    return p.unsqueeze(-1) if like.ndim == 3 else p.view(p.shape + (1,) * (like.ndim - 2))


def _mean(z: Tensor, plus: float = 0.0) -> Tensor:
    """(m, 1, B) mean over features of (m, features, B), and a constant. As a product it takes half the time of
    ``Tensor.mean``."""
    average = _constant(z.shape[0], 1, z.shape[1], 1.0 / z.shape[1])
    return torch.baddbmm(_constant(1, 1, 1, plus), average, z) if plus else torch.bmm(average, z)


@lru_cache(maxsize=256)
def _constant(n: int, rows: int, width: int, value: float) -> Tensor:
    return torch.full((n, rows, width), value)


def _channel_sums(d: Tensor) -> Tensor:
    """(n, channels, B): summed over positions, where there are any."""
    return d if d.ndim == 3 else d.sum(tuple(range(2, d.ndim - 1)))


@dataclass(frozen=True)
class ReLU:
    out: Shape
    inplace: bool
    """Whether its input is nobody else's, so that it may be overwritten."""
    shapes: tuple[Shape, ...] = ()

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        y = a.relu_() if self.inplace else a.relu()
        return y, y

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        return _relu_backward(d, saved, 0)


_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True)
class Reshape:
    """``nn.Flatten``."""

    given: Shape
    shapes: tuple[Shape, ...] = ()

    @property
    def out(self) -> Shape:
        return (math.prod(self.given),)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        return a.reshape(a.shape[0], *self.out, a.shape[-1]), None

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        return d.reshape(d.shape[0], *self.given, d.shape[-1])


@dataclass(frozen=True)
class Chain:
    """Layers one after the other."""

    layers: tuple[Layer, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for layer in self.layers for shape in layer.shapes)

    @property
    def out(self) -> Shape:
        return self.layers[-1].out

    def each(self, p: Sequence[Tensor]) -> list[tuple[Layer, Sequence[Tensor]]]:
        """The layers with their parameters."""
        rest = iter(p)
        return [(layer, list(islice(rest, len(layer.shapes)))) for layer in self.layers]

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        saved = []
        for layer, own in self.each(p):
            a, kept = layer.forward(own, a)
            saved.append(kept)
        return a, saved

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        at += len(self.shapes)
        begin = next(i for i, layer in enumerate(self.layers) if layer.shapes) if first else 0
        for i, (layer, own) in reversed(list(enumerate(self.each(p)))[begin:]):
            at -= len(own)
            d = layer.backward(own, saved[i], d, out, at, first and i == begin)
        return d


class Branch(Chain):
    """``Residual``: layers whose output is added to their input."""

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        z, saved = super().forward(p, a)
        return a + z, saved

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        return d + super().backward(p, saved, d, out, at, False)
