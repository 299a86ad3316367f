"""Normalization layers: GroupNorm as the package uses it, and what to do about BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedtail.errors import FedtailError
from fedtail.words import plural


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """GroupNorm, or a clear error where ``groups`` does not divide the channels."""
    if groups < 1 or channels % groups:
        fit = ", ".join(str(g) for g in range(1, channels + 1) if channels % g == 0)
        raise FedtailError(f"model.norm_groups = {groups} does not divide {channels} channels; these do: {fit}")
    return nn.GroupNorm(groups, channels)


def has_batchnorm(module: nn.Module) -> bool:
    """Whether samples of a batch influence each other, so that a batch may not be split by group."""
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def batchnorm_note(module: nn.Module) -> str | None:
    """Say what BatchNorm in this model means for a federation; None if there is none."""
    names = [name or type(m).__name__ for name, m in module.named_modules() if isinstance(m, _BatchNorm)]
    if not names:
        return None
    return (
        f"the model has {plural(len(names), 'BatchNorm layer')} (first: {names[0]}). Its statistics mix the samples "
        "of a batch, so class groups cannot be computed on their own samples: each step takes one forward and one "
        "backward pass per group, and a group's gradient depends on the other groups' samples. Its running "
        "statistics are averaged over clients as parameters are, and fit no client well when class mixes differ. "
        'model.batchnorm = "groupnorm" converts these layers to GroupNorm'
    )


def to_groupnorm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm layer by GroupNorm, in place, keeping affine weights; returns the module.

    Each layer gets the largest number of groups that divides its channels, is at most ``groups`` and leaves two
    channels per group: with one, a dense layer's output would be normalized to zero. BatchNorm1d, which may see
    plain features, gets one group.
    """
    return _replaced(module, partial(_convert, groups=groups))


class ChannelAffine(nn.Module):
    """A factor and an offset per channel: what BatchNorm with fixed statistics is."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (x.ndim - 2)
        return x * self.weight.view(shape) + self.bias.view(shape)


def fix_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer, in place, by what it computes in evaluation; returns the module.

    For pretrained networks: their statistics are worth keeping, and samples of a batch no longer influence each other.
    """
    return _replaced(module, _fixed)


def _replaced(module: nn.Module, make: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """The module with another in place of every BatchNorm layer."""
    if isinstance(module, _BatchNorm):
        return make(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _replaced(child, make))
    return module


@torch.no_grad()
def _fixed(layer: _BatchNorm) -> ChannelAffine:
    if layer.running_mean is None or layer.running_var is None:
        raise FedtailError("a BatchNorm layer without running statistics depends on its batch, so it cannot encode")
    factor = torch.rsqrt(layer.running_var + layer.eps)
    factor = factor * layer.weight if layer.weight is not None else factor
    offset = -layer.running_mean * factor
    return ChannelAffine(factor, offset + layer.bias if layer.bias is not None else offset)


def _convert(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    if channels == 0 or any(is_lazy(p) for p in layer.parameters()):
        raise FedtailError("a lazy BatchNorm layer has no size yet; run one forward pass before conversion")
    most = 1 if isinstance(layer, nn.BatchNorm1d) else min(groups, max(channels // 2, 1))
    count = next(g for g in range(most, 0, -1) if channels % g == 0)
    out = nn.GroupNorm(count, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        out.weight, out.bias = layer.weight, layer.bias
    return out.train(layer.training)
