"""Heads: small models on the features of an encoder, or on any vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.models.registry import MODELS


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
    return nn.Sequential(*layers, _zeros(nn.Linear(width, n_classes)))


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


def _zeros(layer: nn.Linear) -> nn.Linear:
    """Start at equal scores for all classes; the problem is convex, so nothing needs breaking."""
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    return layer
