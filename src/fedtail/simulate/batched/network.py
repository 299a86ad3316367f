"""A sequential network for many models at once: recognised from an ``nn.Sequential``, run by ``layers``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.models.mlp import Residual
from fedtail.simulate.batched.layers import (
    Branch,
    Chain,
    Gradients,
    GroupNorm,
    Layer,
    Linear,
    ReLU,
    Reshape,
    Shape,
    Window,
)


@dataclass(frozen=True)
class Network:
    """``chain`` on n flat models; parameters in the module's own order."""

    input_shape: Shape
    chain: Chain

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.chain.layers

    @property
    def along_sequences(self) -> bool:
        """Whether it convolves or is recurrent."""
        return any(getattr(layer, "along_sequence", False) for layer in self.layers)

    def parameters(self, flat: Tensor) -> list[Tensor]:
        """Views of (n, d) parameters."""
        shapes = self.chain.shapes
        parts = flat.split([math.prod(shape) for shape in shapes], 1)
        return [part.view(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)]

    def forward(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """Logits (n, C, B) of models (n, d) on inputs (n, B, ...), and what ``backward`` needs."""
        params = self.parameters(x)
        a, saved = self.chain.forward(params, self._samples_last(inputs))
        return a, (params, saved)

    def answers(self, x: Tensor, inputs: Tensor) -> Tensor:
        a = self._samples_last(inputs)
        for layer, p in self.chain.each(self.parameters(x)):
            a = _answers(layer, p, a)
        return a

    def _samples_last(self, inputs: Tensor) -> Tensor:
        """(n, B, ...) -> (n, ..., B); a view where the first layer takes flat samples, whose products read either
        order."""
        if isinstance(self.layers[0], Linear | Reshape) or getattr(self.layers[0], "takes_flat", False):
            return inputs.flatten(2).transpose(1, 2)
        return inputs.movedim(1, -1).contiguous()

    def affine_logits(self, base: Tensor, directions: Tensor, patterns: Tensor, inputs: Tensor) -> Tensor:
        """(c, C, B) logits of the models base + patterns @ directions on the same inputs (B, ...).

        A linear layer that sees the inputs is linear in its parameters, so its output is combined from A + 1 products
        instead of being computed c times; it holds most of a small network's work.
        """
        models = base + patterns @ directions
        first = next(i for i, layer in enumerate(self.layers) if not isinstance(layer, Reshape))
        if not isinstance(self.layers[first], Linear):
            return self.answers(models, inputs.expand(len(models), *inputs.shape))
        a = inputs.reshape(1, inputs.shape[0], -1).transpose(1, 2).expand(len(directions) + 1, -1, -1)
        layer, p = self.chain.each(self.parameters(torch.cat([base.unsqueeze(0), directions])))[first]
        parts = layer.forward(p, a)[0]
        z = torch.addmm(parts[0].reshape(1, -1), patterns, parts[1:].flatten(1)).view(-1, *parts.shape[1:])
        for layer, p in self.chain.each(self.parameters(models))[first + 1 :]:
            z = _answers(layer, p, z)
        return z

    def backward(
        self, saved: Any, d: Tensor, windows: Sequence[Window], masks: Tensor | None, into: Tensor, keep: float | Tensor
    ) -> None:
        """See ``Kernel``."""
        params, kept = saved
        out = Gradients(into, keep, windows, masks, self.chain.shapes)
        self.chain.backward(params, kept, d, out, 0, True)
        out.finish()


def _answers(layer: Layer, p: Sequence[Tensor], a: Tensor) -> Tensor:
    """A layer's output when the model is asked and not trained."""
    own = getattr(layer, "answers", None)
    return own(p, a) if own else layer.forward(p, a)[0]


def recognise(module: nn.Module, input_shape: Shape) -> Network | None:
    """The network of an ``nn.Sequential`` (nested ones too) of known layers; None if anything else is in it."""
    leaves = _leaves(module)
    if leaves is None or any(not p.requires_grad for p in module.parameters()):
        return None
    if len({id(p) for p in module.parameters()}) != sum(len(list(m.parameters())) for m in leaves):
        return None
    layers = _layers(leaves, input_shape)
    if layers is None or len(layers[-1].out) != 1 or not any(layer.shapes for layer in layers):
        return None
    return Network(input_shape, Chain(tuple(layers)))


def _layers(leaves: Sequence[nn.Module], shape: Shape) -> list[Layer] | None:
    """The layers for samples of a shape, or None if one is not known; at least one, for there are leaves."""
    layers: list[Layer] = []
    for leaf in leaves:
        if type(leaf) is nn.Identity:
            continue
        if type(leaf) is nn.ReLU:
            layers.append(ReLU(shape, inplace=bool(layers) and _fresh(layers[-1])))
            continue
        make = LAYERS.get(type(leaf))
        made = make(leaf, shape) if make else None
        if made is None:
            return None
        layers += made if isinstance(made, list) else [made]
        shape = layers[-1].out
    return layers or None


def _leaves(module: nn.Module) -> list[nn.Module] | None:
    if type(module) is not nn.Sequential:
        return [module] if type(module) in (*LAYERS, nn.Identity, nn.ReLU) else None
    out: list[nn.Module] = []
    for child in module:
        inner = _leaves(child)
        if inner is None:
            return None
        out += inner
    return out


def _fresh(layer: Layer) -> bool:
    """Whether a layer's output is used by the next layer only."""
    return isinstance(layer, Linear) or (isinstance(layer, GroupNorm) and layer.affine)


def linear(m: nn.Module, shape: Shape) -> Layer | None:
    assert isinstance(m, nn.Linear)
    return Linear(m.in_features, m.out_features, m.bias is not None) if shape == (m.in_features,) else None


def _norm(m: nn.Module, shape: Shape) -> Layer | None:
    assert isinstance(m, nn.GroupNorm)
    if shape[0] != m.num_channels or (m.affine and m.bias is None):
        return None
    return GroupNorm(groups=m.num_groups, channels=m.num_channels, out=shape, eps=m.eps, affine=m.affine)


def _flatten(m: nn.Module, shape: Shape) -> Layer | None:
    assert isinstance(m, nn.Flatten)
    return Reshape(shape) if (m.start_dim, m.end_dim) == (1, -1) else None


def _residual(m: nn.Module, shape: Shape) -> Layer | None:
    assert isinstance(m, Residual)
    leaves = _leaves(m.body)
    layers = _layers(leaves, shape) if leaves else None
    return Branch(tuple(layers)) if layers is not None and layers[-1].out == shape else None


LAYERS: dict[type[nn.Module], Callable[[nn.Module, Shape], Layer | list[Layer] | None]] = {
    nn.Linear: linear,
    nn.GroupNorm: _norm,
    nn.Flatten: _flatten,
    Residual: _residual,
}
"""Module -> what it is made of, for samples of a shape; None where it is not known. A module's own file may add it."""
