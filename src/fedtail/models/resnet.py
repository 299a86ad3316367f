"""ResNet-8, ResNet-18 and ResNet-34 with GroupNorm (He et al. 2016; Wu & He 2018).

GroupNorm keeps the samples of a batch apart, so a batch may be split by class group at no cost, and there are no
running statistics to average over clients. BatchNorm is there for results that were published with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.errors import FedtailError
from fedtail.models.norm import group_norm
from fedtail.models.registry import MODELS

LARGE_SIDE = 96
"""From this many pixels on, ``stem="auto"`` takes the large stem."""
Norm = Callable[[int], nn.Module]
"""The normalization of so many channels."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, planes: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.norm2 = norm(planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, planes, 1, stride=stride, bias=False), norm(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages of blocks, global average pooling, linear output. x: (N, channels, height, width)."""

    def __init__(
        self, channels: int, n_classes: int, blocks: tuple[int, ...], width: int, norm: Norm, large_stem: bool, he: bool
    ) -> None:
        super().__init__()
        side, stride, pool = (7, 2, [nn.MaxPool2d(3, stride=2, padding=1)]) if large_stem else (3, 1, [])
        first = nn.Conv2d(channels, width, side, stride=stride, padding=side // 2, bias=False)
        self.stem = nn.Sequential(first, norm(width), nn.ReLU(), *pool)
        layers: list[nn.Module] = []
        planes = width
        for stage, count in enumerate(blocks):
            out = width * 2**stage
            for i in range(count):
                layers.append(BasicBlock(planes, out, 2 if stage and i == 0 else 1, norm))
                planes = out
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(planes, n_classes)
        if he:  # as the authors do; torch's default is a factor of 2.4 smaller, which under normalization means a
            # learning rate six times as large
            for layer in self.modules():
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(self.stem(x))
        return self.output(out.mean(dim=(2, 3)))


def resnet(*blocks: int) -> Callable[..., nn.Module]:
    """The builder of a ResNet with so many blocks in each stage."""

    def build(
        input_shape: tuple[int, ...],
        n_classes: int,
        norm_groups: int = 32,
        stem: Literal["auto", "small", "large"] = "auto",
        width: int = 64,
        init: Literal["he", "torch"] = "he",
        norm: Literal["group", "batch"] = "group",
    ) -> nn.Module:
        """``stem``: ``small`` is a 3x3 convolution without pooling (the paper's, for CIFAR); ``large`` is 7x7 with
        stride 2 and max-pooling, for images of 96 pixels and more; ``auto`` chooses by size.
        ``init``: ``he`` as in the original paper, ``torch`` for the library's smaller default.
        ``norm``: ``group`` with ``norm_groups`` groups, or ``batch``.
        """
        if len(input_shape) != 3:
            raise FedtailError(f"a ResNet takes images (channels, height, width), not samples of shape {input_shape}")
        large = stem == "large" or (stem == "auto" and min(input_shape[1:]) >= LARGE_SIDE)
        layer = nn.BatchNorm2d if norm == "batch" else partial(group_norm, groups=norm_groups)
        return ResNet(input_shape[0], n_classes, blocks, width, layer, large, init == "he")

    return build


MODELS.add("resnet8")(resnet(1, 1, 1))  # what papers on long-tailed federated learning take for CIFAR
MODELS.add("resnet18")(resnet(2, 2, 2, 2))  # 11,173,962 parameters for 3x32x32 and 10 classes
MODELS.add("resnet34")(resnet(3, 4, 6, 3))
