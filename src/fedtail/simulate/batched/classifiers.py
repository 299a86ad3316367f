"""Output layers of ``models.classifiers`` for many models at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.simulate.batched.layers import Gradients, Linear, Shape

EPS = 1e-12
"""What ``torch.nn.functional.normalize`` divides by at least."""


@dataclass(frozen=True)
class Simplex:
    """``SimplexETF``: inputs brought to length 1, centred, times a trained scale."""

    out: Shape
    shapes: tuple[Shape, ...] = ((),)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        inverse = a.square().sum(1, keepdim=True).sqrt_().clamp_(min=EPS).reciprocal_()
        unit = a * inverse
        plain = (unit - unit.mean(1, keepdim=True)).mul_(self._stretch)
        return plain * p[0].view(-1, 1, 1), (unit, plain, inverse)

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        unit, plain, inverse = saved
        inner = (d - d.mean(1, keepdim=True)) * (p[0].view(-1, 1, 1) * self._stretch)
        out.sums(at, (d * plain).sum(1, keepdim=True))
        inner = inner - unit * (unit * inner).sum(1, keepdim=True)
        return inner.mul_(inverse)

    @property
    def _stretch(self) -> float:
        (c,) = self.out
        return math.sqrt(c / max(c - 1, 1))


@dataclass(frozen=True, eq=False)
class Heads:
    """``TwoHeads``: in training the logits of a fixed simplex, then those of a linear layer that features do not learn
    from; ``answers`` are those of the linear layer with rows of one length."""

    linear: Linear
    simplex: Tensor
    """(C, d)."""
    row_norm: float

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.linear.shapes

    @property
    def out(self) -> Shape:
        return (2 * self.linear.outputs,)

    def forward(self, p: Sequence[Tensor], a: Tensor) -> tuple[Tensor, Any]:
        fixed = torch.bmm(self._fixed(a), a)
        return torch.cat([fixed, self.linear.forward(p, a)[0]], 1), a

    def backward(self, p: Sequence[Tensor], saved: Any, d: Tensor, out: Gradients, at: int, first: bool) -> Tensor:
        c = self.linear.outputs
        self.linear.backward(p, saved, d[:, c:].contiguous(), out, at, True)
        return torch.bmm(self._fixed(d).transpose(1, 2), d[:, :c])

    def answers(self, p: Sequence[Tensor], a: Tensor) -> Tensor:
        lengths = p[0].square().sum(2, keepdim=True).sqrt_().clamp_(min=EPS)
        return self.linear.forward([p[0] * (self.row_norm / lengths), *p[1:]], a)[0]

    def _fixed(self, like: Tensor) -> Tensor:
        return self.simplex.to(like.device).expand(len(like), -1, -1)
