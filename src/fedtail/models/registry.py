"""The registry of models: ``name(input_shape, n_classes, **options) -> nn.Module``."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import nn

from fedtail.core.random import torch_seed
from fedtail.errors import FedtailError, check_range
from fedtail.models.classifiers import with_classifier
from fedtail.models.custom import custom_model
from fedtail.models.norm import batchnorm_note, treat_batchnorm
from fedtail.registry import Registry, is_own

MODELS: Registry[nn.Module] = Registry("model", given=("input_shape", "n_classes"), group="models")

WIDTHS = {"hidden", "channels", "width"}
"""Options that hold layer widths, one or several."""


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
    the output layer shall be; see ``models.classifiers``."""
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
    module = treat_batchnorm(module, batchnorm)
    note = batchnorm_note(module)
    if note:
        warnings.warn(note, stacklevel=2)
    return module
