"""A residual MLP for tables: blocks that add to what they get, with GroupNorm in front (Gorishniy et al. 2021).

The first layer's column of a one-hot feature is the embedding of that level, and its columns of a number's pieces are
the embedding of where the number lies: both are as wide as the network.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedtail.errors import check_range
from fedtail.models.norm import group_norm
from fedtail.models.registry import MODELS


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


@MODELS.add("residual_mlp")
def residual_mlp(
    input_shape: tuple[int, ...], n_classes: int, width: int = 64, blocks: int = 2, norm_groups: int = 1
) -> nn.Module:
    """A linear layer, ``blocks`` of x + linear(relu(linear(norm(x)))), norm, ReLU and a linear output layer."""
    check_range("model.blocks", blocks, 0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), width)]
    for _ in range(blocks):
        layers.append(
            Residual(group_norm(width, norm_groups), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        )
    return nn.Sequential(*layers, group_norm(width, norm_groups), nn.ReLU(), nn.Linear(width, n_classes))
