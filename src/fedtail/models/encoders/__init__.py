"""Pretrained networks that turn images into features, of which only a head is trained and sent."""

from fedtail.models.encoders import efficientnet_lite  # registers efficientnet_lite0 to 2
from fedtail.models.encoders.base import ENCODERS, Encoder, Encoding
from fedtail.models.encoders.opening import (
    DEFAULT,
    default_encoder,
    is_code,
    is_registered,
    named,
    open_encoder,
    use_encoder,
)

__all__ = [
    "DEFAULT",
    "ENCODERS",
    "Encoder",
    "Encoding",
    "default_encoder",
    "efficientnet_lite",
    "is_code",
    "is_registered",
    "named",
    "open_encoder",
    "use_encoder",
]
