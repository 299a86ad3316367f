"""The registry of models: ``name(input_shape, n_classes, **options) -> nn.Module``."""

from __future__ import annotations

import torch
from torch import nn

from fedtail.core.random import torch_seed
from fedtail.core.registry import Registry

MODELS: Registry[nn.Module] = Registry("model")


def build_model(
    name: str, input_shape: tuple[int, ...], n_classes: int, *, seed: int = 0, **options: object
) -> nn.Module:
    """A freshly initialised model; the same seed gives the same weights, and torch's own state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "model"))
        return MODELS.build(name, input_shape, n_classes, **options)
