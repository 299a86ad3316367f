"""Layers along sequences for many models at once: convolution, pooling, an LSTM of which the last output is used.

Activations are (n, channels, L, B), samples last: a step along the sequence is B values further on, so that each
position of a filter is one batched product with no rearranging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.simulate.batched.layers import Gradients, Shape


@dataclass(frozen=True)
class Fold:
    """``nn.Unflatten``: features as channels of a sequence."""

    takes_flat = True

    given: Shape
    channels: int
    shapes: tuple[Shape, ...] = ()

    @property
    def out(self) -> Shape:
        return (self.channels, math.prod(self.given) // self.channels)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        return a.reshape(a.shape[0], *self.out, a.shape[-1]).contiguous(), None

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        return d.reshape(d.shape[0], *self.given, d.shape[-1])


@dataclass(frozen=True)
class Conv1d:
    """Stride 1, an odd filter, and padding that keeps the length."""

    along_sequence = True

    inputs: int
    outputs: int
    width: int
    length: int
    bias: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        weight = (self.outputs, self.inputs, self.width)
        return (weight, (self.outputs,)) if self.bias else (weight,)

    @property
    def out(self) -> Shape:
        return (self.outputs, self.length)

    @property
    def shifts(self) -> list[int]:
        """From an output to the inputs that the filter's positions read."""
        return [s for s in range(-(self.width // 2), self.width // 2 + 1) if abs(s) < self.length]

    @property
    def narrow(self) -> bool:
        """So few inputs that their copies, one for each position of the filter, cost less than a product each."""
        return self.inputs * self.width <= 16

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        x, b = a.flatten(2), a.shape[-1]
        if self.narrow:
            reach = self.width // 2
            padded = F.pad(a, (0, 0, reach, reach))
            a = torch.stack([padded[:, :, r : r + self.length] for r in range(self.width)], 2).flatten(1, 2)
            x, w = a.flatten(2), p[0].flatten(2)
            y = torch.baddbmm(p[1].unsqueeze(-1), w, x) if self.bias else torch.bmm(w, x)
            return y.view(*y.shape[:2], *a.shape[2:]), a
        w = p[0].movedim(-1, 1).contiguous()
        middle = w[:, self.width // 2]
        y = torch.baddbmm(p[1].unsqueeze(-1), middle, x) if self.bias else torch.bmm(middle, x)
        self._add_shifted(y, x, w, b, 1)
        return y.view(*y.shape[:2], *a.shape[2:]), a

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        inner, b = d, d.shape[-1]
        if not first:
            w = p[0].movedim(-1, 1).transpose(2, 3).contiguous()
            inner = torch.bmm(w[:, self.width // 2], d.flatten(2))
            self._add_shifted(inner, d.flatten(2), w, b, -1)
            inner = inner.view(len(d), self.inputs, *d.shape[2:])
        out.over_positions(at, d, saved, 0 if self.narrow else self.width // 2)
        if self.bias:
            out.sums(at + 1, d.sum(2))
        return inner

    def _add_shifted(self, into: Tensor, x: Tensor, w: Tensor, b: int, sign: int) -> None:
        """Add the products of the filter's positions beside the middle: x that many steps of b values further on, or
        (sign -1) further back."""
        total = x.shape[-1]
        for s in self.shifts:
            if s:
                k = sign * s * b
                source, place = x[..., max(k, 0) : total + min(k, 0)], into[..., max(-k, 0) : total + min(-k, 0)]
                place.baddbmm_(w[:, s + self.width // 2], source)


@dataclass(frozen=True)
class MaxPool1d:
    """Take the larger of each pair; a last odd value is left out."""

    given: Shape
    shapes: tuple[Shape, ...] = ()

    @property
    def out(self) -> Shape:
        return (self.given[0], self.given[1] // 2)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        even, odd = a[:, :, : 2 * self.out[1]].unflatten(2, (-1, 2)).unbind(3)
        return torch.maximum(even, odd), even >= odd

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        even = torch.where(saved, d, 0.0)
        inner = torch.stack([even, d - even], 3).flatten(2, 3)
        return F.pad(inner, (0, 0, 0, 1)) if self.given[1] % 2 else inner


@dataclass(frozen=True)
class Lstm:
    """One layer from a zero state, of which the last output is used."""

    along_sequence = True

    inputs: int
    hidden: int
    steps: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        gates = 4 * self.hidden
        return ((gates, self.inputs), (gates, self.hidden), (gates,), (gates,))

    @property
    def out(self) -> Shape:
        return (self.hidden,)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        w_in, w, b_in, b_again = p
        k, b = self.hidden, a.shape[-1]
        gates = torch.baddbmm((b_in + b_again).unsqueeze(-1), w_in, a.flatten(2)).view(len(a), 4 * k, self.steps, b)
        kept = []
        h = before = gates.new_zeros(len(a), k, b)
        for t in range(self.steps):
            z = torch.baddbmm(gates[:, :, t], w, h) if t else gates[:, :, t]
            i, f, _, o = z.sigmoid().split(k, 1)
            g = z[:, 2 * k : 3 * k].tanh()
            c = torch.addcmul(i * g, f, before)
            bent = c.tanh()
            h = o * bent
            kept.append((i, f, g, o, before, bent, h))
            before = c
        return h, (a, kept)

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        a, kept = saved
        w_in, w = p[0].transpose(1, 2), p[1].transpose(1, 2)
        i, f, g, o, before, bent, h = (torch.stack(values, 2) for values in zip(*kept, strict=True))
        # all that does not come from later steps, for all steps at once
        by_cell = torch.stack([_sigmoid_backward(g, i), _sigmoid_backward(before, f), _tanh_backward(i, g)], 1)
        by_output, through = _sigmoid_backward(bent, o), _tanh_backward(o, bent)
        dh, dc, parts = d, torch.zeros_like(d), list[Tensor]()
        for t in reversed(range(self.steps)):
            dc = torch.addcmul(dc, dh, through[:, :, t])
            inner = (dc.unsqueeze(1) * by_cell[:, :, :, t]).flatten(1, 2)
            parts.append(torch.cat([inner, dh * by_output[:, :, t]], 1))
            if t:
                dc, dh = dc * f[:, :, t], torch.bmm(w, parts[-1])
        gates = torch.stack(parts[::-1], 2)
        below = d if first else torch.bmm(w_in, gates.flatten(2)).view(a.shape)
        out.over_positions(at, gates, a)
        out.over_positions(at + 1, gates[:, :, 1:], h[:, :, :-1])
        total = gates.sum(2)
        out.sums(at + 2, total)
        out.sums(at + 3, total)
        return below


_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
_tanh_backward = torch.ops.aten.tanh_backward.default
