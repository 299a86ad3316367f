"""Models, and the flat vector that the rest of the package sees."""

from fedtail.models import mlp, resnet, small_cnn
from fedtail.models.custom import custom_model
from fedtail.models.flat import FlatModel
from fedtail.models.norm import batchnorm_note, has_batchnorm, to_groupnorm
from fedtail.models.registry import MODELS, build_model, choose_model

__all__ = [
    "MODELS",
    "FlatModel",
    "batchnorm_note",
    "build_model",
    "choose_model",
    "custom_model",
    "has_batchnorm",
    "mlp",
    "resnet",
    "small_cnn",
    "to_groupnorm",
]
