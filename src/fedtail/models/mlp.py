"""Networks for tables (``mlp``, ``residual_mlp``) and heads for features of an encoder (``linear``, ``cosine``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.errors import check_range
from fedtail.models.norm import group_norm
from fedtail.models.registry import MODELS


@MODELS.add("mlp")
def mlp(
    input_shape: tuple[int, ...], n_classes: int, hidden: Sequence[int] = (32, 16, 8), norm_groups: int = 1
) -> nn.Module:
    """Linear-GroupNorm-ReLU blocks, then a linear output layer; by default the paper's 4-layer FFNN.

    ``norm_groups``: GroupNorm groups per hidden layer (1 normalises over all units); 0 leaves it out.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for units in hidden:
        layers.append(nn.Linear(width, units))
        if norm_groups:
            layers.append(group_norm(units, norm_groups))
        layers.append(nn.ReLU())
        width = units
    return nn.Sequential(*layers, nn.Linear(width, n_classes))


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.body(x))


@MODELS.add("residual_mlp")
def residual_mlp(
    input_shape: tuple[int, ...], n_classes: int, width: int = 64, blocks: int = 2, norm_groups: int = 1
) -> nn.Module:
    """A linear layer, ``blocks`` of x + linear(relu(linear(norm(x)))), norm, ReLU and a linear output layer
    (Gorishniy et al. 2021).

    The first layer's column of a one-hot feature is the embedding of that level, and its columns of a number's pieces
    are the embedding of where the number lies.
    """
    check_range("model.blocks", blocks, 0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), width)]
    for _ in range(blocks):
        first, last = nn.Linear(width, width), nn.Linear(width, width)
        layers.append(Residual(group_norm(width, norm_groups), first, nn.ReLU(), last))
    return nn.Sequential(*layers, group_norm(width, norm_groups), nn.ReLU(), nn.Linear(width, n_classes))


@MODELS.add("linear")
def linear(input_shape: tuple[int, ...], n_classes: int, norm: bool = True) -> nn.Module:
    """Multinomial logistic regression.

    ``norm``: bring every sample to mean 0 and deviation 1 over its features first, so that one learning rate suits all
    encoders without any statistics of the data.
    """
    width = math.prod(input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    if norm and width > 1:
        layers.append(nn.GroupNorm(1, width, affine=False))
    layers.append(nn.Linear(width, n_classes))
    for parameter in layers[-1].parameters():
        nn.init.zeros_(parameter)  # equal scores for all classes: the problem is convex, so nothing needs breaking
    return nn.Sequential(*layers)


@MODELS.add("cosine")
def cosine(input_shape: tuple[int, ...], n_classes: int, scale: float = 16.0) -> nn.Module:
    """Cosine of features and class vectors, times ``scale``: a common class gets no longer vector than a rare one."""
    width = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), nn.GroupNorm(1, width, affine=False), Cosine(width, n_classes, scale))


class Cosine(nn.Linear):
    """(N, d) -> (N, C) scaled cosines."""

    def __init__(self, width: int, n_classes: int, scale: float) -> None:
        super().__init__(width, n_classes, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x), F.normalize(self.weight))
