"""``model = "auto"``: a sensible architecture from the shape of a sample alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedtail.models.registry import MODELS

RESNET_SIDE = 48
"""Images whose shorter side has this many pixels or more get a ResNet."""


def choose_model(input_shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Model name and options for samples of a shape.

    - images (channels, height, width): ``small_cnn`` below 48 pixels, ``resnet18`` from there on;
    - anything else: a ``residual_mlp`` of width 64 and two blocks; wider ones did no better on tables and cost more.
    """
    if len(input_shape) == 3:
        return ("resnet18" if min(input_shape[1:]) >= RESNET_SIDE else "small_cnn"), {}
    return "residual_mlp", {"width": 64, "blocks": 2}


@MODELS.add("auto")
def auto(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """A residual MLP for tables, a small CNN or a ResNet-18-GN by image size."""
    name, options = choose_model(input_shape)
    return MODELS.build(name, input_shape, n_classes, **options)
