"""Layers of many models at once, with hand-derived backward passes, for models too small to fill a core.

Row i of the flat parameters (n, d) is one model (a client, or a client's probe); each model sees its own batch.
Activations are (n, features..., B): samples last, so that normalization and activations are contiguous over
samples and every matrix product is one batched GEMM. No step of ``backward`` mixes samples, so one pass serves
all H groups of classes; only the products that sum over samples into parameters are taken per group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Window(NamedTuple):
    """Where a group's samples lie in a batch sorted by group: columns ``low:high`` contain all of them."""

    low: int
    high: int
    mask: Tensor | None
    """(n, 1, high - low) weight of each sample, 0 outside the group; None if the gradient is weighted already."""


class Sums(NamedTuple):
    """A parameter gradient that is still a sum over samples: (n, features, B)."""

    terms: Tensor


PerGroup = list[Tensor]
"""H tensors (n, features...): a parameter gradient, group by group."""

Piece = PerGroup | Sums


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

    def backward(
        self, p: Sequence[Tensor], saved: Any, d: Tensor, windows: Sequence[Window], first: bool
    ) -> tuple[Tensor, list[Piece]]:
        """Gradient of the input (anything, if ``first``), and of the parameters."""
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

    def backward(
        self, p: Sequence[Tensor], saved: Any, d: Tensor, windows: Sequence[Window], first: bool
    ) -> tuple[Tensor, list[Piece]]:
        pieces: list[Piece] = [weight_gradients(d, saved, windows)]
        if self.bias:
            pieces.append(Sums(d))
        return d if first else torch.bmm(p[0].transpose(1, 2), d), pieces


def weight_gradients(d: Tensor, a: Tensor, windows: Sequence[Window]) -> PerGroup:
    """Per group sum_i w_i d_i a_i^T. d: (n, out, B); a: (n, in, B); gives H tensors (n, out, in)."""
    grads = []
    for low, high, mask in windows:
        part, inputs = d, a
        if high - low < d.shape[-1]:
            part, inputs = d[..., low:high], a[..., low:high]
        if mask is not None:
            part = part * mask
        grads.append(torch.bmm(part, inputs.transpose(1, 2)))
    return grads


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
        scale = _mean(z * z).add_(self.eps).rsqrt_()
        z.mul_(scale)
        normal = z if z.shape == a.shape else z.view(a.shape)
        if not self.affine:
            return normal, (normal, scale)
        y = normal * _column(p[0], a)
        return y.add_(_column(p[1], a)), (normal, scale)

    def backward(
        self, p: Sequence[Tensor], saved: Any, d: Tensor, windows: Sequence[Window], first: bool
    ) -> tuple[Tensor, list[Piece]]:
        normal, scale = saved
        product = d * normal
        pieces: list[Piece] = []
        flat = (d.shape[0] * self.groups, -1, d.shape[-1])
        if self.affine:
            pieces = [Sums(_channel_sums(product)), Sums(_channel_sums(d))]
            row = self._row(p[0], flat[0])  # sums of gamma d, of gamma d times normal: products with gamma
            total, slope = torch.bmm(row, d.reshape(flat)), torch.bmm(row, product.reshape(flat))
            out, size = (d * _column(p[0], d)).view(flat), math.prod(self.out) / self.groups
        else:
            out, size = d.reshape(flat).clone(), 1.0
            total, slope = _mean(out), _mean(product.reshape(flat))
        out.sub_(total, alpha=1.0 / size).addcmul_(normal.view(flat), slope, value=-1.0 / size).mul_(scale)
        return out.view(d.shape), pieces

    def _row(self, gamma: Tensor, rows: int) -> Tensor:
        """(n G, 1, R): gamma of each of a group's R values."""
        positions = math.prod(self.out[1:])
        if positions > 1:
            gamma = gamma.unsqueeze(-1).expand(*gamma.shape, positions)
        return gamma.reshape(rows, 1, -1)


def _column(p: Tensor, like: Tensor) -> Tensor:
    """Per-channel parameters (n, C), shaped to broadcast over positions and samples."""
    return p.unsqueeze(-1) if like.ndim == 3 else p.view(p.shape + (1,) * (like.ndim - 2))


def _mean(z: Tensor) -> Tensor:
    """(m, 1, B) mean over features of (m, features, B). As a product it takes half the time of ``Tensor.mean``."""
    if torch.compiler.is_compiling() or z.is_cuda:  # a recorded graph must not read memory that a cache may drop
        return z.mean(1, keepdim=True)
    return torch.bmm(_averaging(z.shape[0], z.shape[1], z.device), z)


@lru_cache(maxsize=256)
def _averaging(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.full((rows, 1, width), 1.0 / width, device=device)


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

    def backward(
        self, p: Sequence[Tensor], saved: Any, d: Tensor, windows: Sequence[Window], first: bool
    ) -> tuple[Tensor, list[Piece]]:
        return _relu_backward(d, saved, 0), []


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

    def backward(
        self, p: Sequence[Tensor], saved: Any, d: Tensor, windows: Sequence[Window], first: bool
    ) -> tuple[Tensor, list[Piece]]:
        return d.reshape(d.shape[0], *self.given, d.shape[-1]), []


@dataclass(frozen=True)
class Branch:
    """``Residual``: layers whose output is added to their input."""

    layers: tuple[Layer, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for layer in self.layers for shape in layer.shapes)

    @property
    def out(self) -> Shape:
        return self.layers[-1].out

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        z, saved = a, []
        for layer, mine in zip(self.layers, self._own(p), strict=True):
            z, kept = layer.forward(mine, z)
            saved.append(kept)
        return a + z, saved

    def backward(
        self, p: Sequence[Tensor], saved: Any, d: Tensor, windows: Sequence[Window], first: bool
    ) -> tuple[Tensor, list[Piece]]:
        inner, pieces = d, list[Piece]()
        for layer, mine, kept in reversed(list(zip(self.layers, self._own(p), saved, strict=True))):
            inner, more = layer.backward(mine, kept, inner, windows, False)
            pieces[:0] = more
        return d + inner, pieces

    def _own(self, p: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The parameters of each layer."""
        parts, start = list[Sequence[Tensor]](), 0
        for layer in self.layers:
            parts.append(p[start : start + len(layer.shapes)])
            start += len(layer.shapes)
        return parts
