"""Models, and the flat vector that the rest of the package sees."""

from fedtail.models.auto import choose_model
from fedtail.models.cnn_lstm import cnn_lstm
from fedtail.models.custom import custom_model, is_custom
from fedtail.models.flat import FlatModel
from fedtail.models.mlp import mlp
from fedtail.models.norm import batchnorm_note, has_batchnorm, to_groupnorm
from fedtail.models.registry import MODELS, build_model
from fedtail.models.resnet import resnet18, resnet34
from fedtail.models.small_cnn import small_cnn

__all__ = [
    "MODELS",
    "FlatModel",
    "batchnorm_note",
    "build_model",
    "choose_model",
    "cnn_lstm",
    "custom_model",
    "has_batchnorm",
    "is_custom",
    "mlp",
    "resnet18",
    "resnet34",
    "small_cnn",
    "to_groupnorm",
]
