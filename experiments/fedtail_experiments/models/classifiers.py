"""Output layers of FedETF and FedLoGe in place of a model's own linear one, and how many models run them at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.errors import FedtailError
from fedtail.models.registry import OUTPUTS
from fedtail.simulate.batched.layers import Gradients, Layer, Linear, Shape
from fedtail.simulate.batched.network import LAYERS, linear

SCALE = 10.0
"""Where the trained temperature of an ETF classifier starts, as in FedETF's convolutional models."""
SPARSITY, ANGLE_STEPS = 0.6, 400
ROW_NORM = 1.7
"""Norm of every class's weight after realignment, as in FedLoGe's code; only its size against the biases matters."""


def etf(module: nn.Module) -> nn.Module:
    """The module with a fixed simplex behind it; its own linear output layer becomes the projection."""
    if any(isinstance(m, SimplexETF) for m in module.modules()):
        return module
    if linears := [m for m in module.modules() if type(m) is nn.Linear]:
        _break_ties(linears[-1])
    return nn.Sequential(module, SimplexETF())


def sparse_etf(module: nn.Module) -> nn.Module:
    """The module with two heads in place of its linear output layer."""
    if any(isinstance(m, TwoHeads) for m in module.modules()):
        return module
    linears = [(name, m) for name, m in module.named_modules() if type(m) is nn.Linear]
    if not linears:
        raise FedtailError("model.classifier = 'sparse_etf' replaces a linear output layer, and the model has none")
    name, last = linears[-1]
    head = TwoHeads(last)
    if not name:
        return head
    parent = module.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], head)
    return module


def _break_ties(last: nn.Linear) -> None:
    """A projection that starts at zero, as heads on frozen features do, has no direction to be brought to length 1:
    its first gradient is without bounds. Small numbers then, always the same for a width and a number of classes."""
    if bool(last.weight.any()):
        return
    rng = torch.Generator().manual_seed(last.in_features * 100_003 + last.out_features)
    bound = last.in_features**-0.5
    with torch.no_grad():
        last.weight.copy_((2 * torch.rand(last.weight.shape, generator=rng) - 1) * bound)


class SimplexETF(nn.Module):
    """(N, C) -> (N, C) logits against the vertices of a fixed simplex: equiangular, as far apart as they can be.

    The model's own output layer projects to C dimensions, where the simplex's vertices are sqrt(C / (C - 1)) (e_c -
    1/C) up to a rotation, which a trained projection absorbs. So the logits are the projection, brought to length 1,
    centred and scaled by a trained temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(SCALE))

    def forward(self, z: Tensor) -> Tensor:
        c = z.shape[-1]
        h = F.normalize(z, dim=-1)
        return self.scale * math.sqrt(c / max(c - 1, 1)) * (h - h.mean(dim=-1, keepdim=True))


class TwoHeads(nn.Module):
    """FedLoGe's output layer: a fixed sparse simplex that trains the features, and a linear layer that answers.

    In training (N, d) -> (N, 2C): logits of the simplex, then those of the linear layer on features whose gradient is
    cut off. Otherwise (N, C): those of the linear layer with all rows of its weight brought to one length."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(linear.in_features, linear.out_features)
        self.linear.load_state_dict({**self.linear.state_dict(), **linear.state_dict()})
        self.simplex = sparse_simplex(linear.in_features, linear.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The simplex is no parameter and no buffer, since nobody needs to be sent it; it moves with the module
        still."""
        self.simplex = fn(self.simplex)
        return super()._apply(fn, recurse)

    def forward(self, f: Tensor) -> Tensor:
        if self.training:
            return torch.cat([f @ self.simplex, self.linear(f.detach())], -1)
        weight = self.linear.weight
        return F.linear(f, ROW_NORM * F.normalize(weight, dim=1), self.linear.bias)


def sparse_simplex(width: int, n_classes: int, sparsity: float = SPARSITY) -> Tensor:
    """(d, C) unit columns, a share ``sparsity`` of zeros at random places, turned as far apart as they go; always the
    same for a width and a number of classes."""
    rng = torch.Generator().manual_seed(width * 100_003 + n_classes)
    start = torch.randn(width, n_classes, generator=rng, dtype=torch.float64)
    mask = torch.rand(width, n_classes, generator=rng, dtype=torch.float64) >= sparsity
    mask[torch.arange(n_classes) % width, torch.arange(n_classes)] = True  # no column is empty
    with torch.enable_grad():
        free = start.requires_grad_()
        optimizer = torch.optim.Adam([free], lr=0.02)
        for _ in range(ANGLE_STEPS):
            unit = F.normalize(free * mask, dim=0)
            cosines = unit.T @ unit
            worst = torch.logsumexp(20 * (cosines - 2 * torch.eye(n_classes, dtype=torch.float64)), 1).mean()
            optimizer.zero_grad()
            worst.backward()
            optimizer.step()
        return F.normalize(free.detach() * mask, dim=0).float()


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


def _simplex(m: nn.Module, shape: Shape) -> Layer | None:
    return Simplex(shape) if len(shape) == 1 else None


def _heads(m: nn.Module, shape: Shape) -> Layer | None:
    assert isinstance(m, TwoHeads)
    answering = linear(m.linear, shape)
    return Heads(answering, m.simplex.T.contiguous(), ROW_NORM) if isinstance(answering, Linear) else None


LAYERS |= {SimplexETF: _simplex, TwoHeads: _heads}
OUTPUTS |= {SimplexETF, TwoHeads}
