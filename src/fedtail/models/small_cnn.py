"""A small convolutional network with GroupNorm, for images of any size and number of channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedtail.errors import FedtailError
from fedtail.models.norm import group_norm
from fedtail.models.registry import MODELS


@MODELS.add("small_cnn")
def small_cnn(
    input_shape: tuple[int, ...], n_classes: int, channels: Sequence[int] = (32, 64, 128), norm_groups: int = 8
) -> nn.Module:
    """Blocks of 3x3 convolution, GroupNorm, ReLU and 2x2 max-pooling, then global average pooling and a linear layer.

    Pooling stops where a side would fall below 2 pixels, so that very small images work too.
    """
    if len(input_shape) != 3:
        raise FedtailError(f"small_cnn takes images (channels, height, width), not samples of shape {input_shape}")
    if not channels:
        raise FedtailError("model.channels is empty; give one width per block, e.g. [32, 64, 128]")
    layers: list[nn.Module] = []
    width, side = input_shape[0], min(input_shape[1:])
    for out in channels:
        layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), group_norm(out, norm_groups), nn.ReLU()]
        if side >= 4:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, n_classes))
