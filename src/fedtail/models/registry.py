"""The registry of models: ``name(input_shape, n_classes, **options) -> nn.Module``."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtail.core.random import torch_seed
from fedtail.errors import FedtailError, check_range, one_of
from fedtail.models.custom import custom_model
from fedtail.models.norm import batchnorm_note, to_groupnorm
from fedtail.registry import Registry, is_own

MODELS: Registry[nn.Module] = Registry("model", given=("input_shape", "n_classes"), group="models")
CLASSIFIERS: Registry[nn.Module] = Registry("classifier", given=("module",), section="model", group="classifiers")
"""Output layers that some methods need in place of a model's own linear one: a module -> the module with it."""
OUTPUTS: set[type[nn.Module]] = set()
"""The layers that they put there, which are small: where a pass is taken apart by groups of rows, they are not."""

WIDTHS = {"hidden", "channels", "width"}
"""Options that hold layer widths, one or several."""
BATCHNORM = ("keep", "groupnorm")


def build_model(
    name: str,
    input_shape: tuple[int, ...],
    n_classes: int,
    *,
    seed: int = 0,
    batchnorm: str = "keep",
    classifier: str = "linear",
    **options: object,
) -> nn.Module:
    """A freshly initialised model; the same seed gives the same weights, and torch's own state is untouched.

    ``name`` is a registered model, ``auto``, or the user's own ``module:callable``. A model with BatchNorm draws a
    warning that explains what it means here; ``batchnorm="groupnorm"`` converts those layers. ``classifier`` is what
    the output layer shall be, of ``CLASSIFIERS``; ``linear`` is the model's own."""
    if n_classes < 2:
        raise FedtailError(f"a classifier needs two classes or more, not {n_classes}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "model"))
        if is_own(name):
            module = custom_model(name, tuple(input_shape), n_classes, **options)
        else:
            options = MODELS.check(name, options)
            for key in WIDTHS & set(options):
                for width in np.atleast_1d(np.asarray(options[key])):
                    check_range(f"model.{key}", width.item(), 1)
            module = MODELS.build(name, tuple(input_shape), n_classes, **options)
        module = with_classifier(module, classifier)
    if batchnorm not in BATCHNORM:
        raise one_of("model.batchnorm", batchnorm, BATCHNORM)
    module = to_groupnorm(module) if batchnorm == "groupnorm" else module
    if note := batchnorm_note(module):
        warnings.warn(note, stacklevel=2)
    return module


def with_classifier(module: nn.Module, kind: str) -> nn.Module:
    """A module with an output layer of this kind."""
    return module if kind == "linear" else CLASSIFIERS.build(kind, copy.deepcopy(module))


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
