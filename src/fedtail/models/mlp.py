"""Fully connected network with GroupNorm: the paper's 4-layer FFNN is ``hidden = (32, 16, 8)``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from fedtail.models.norm import group_norm
from fedtail.models.registry import MODELS


@MODELS.add("mlp")
def mlp(
    input_shape: tuple[int, ...], n_classes: int, hidden: Sequence[int] = (32, 16, 8), norm_groups: int = 1
) -> nn.Module:
    """Linear-GroupNorm-ReLU blocks, then a linear output layer.

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
