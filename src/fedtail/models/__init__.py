"""Models, and the flat vector that the rest of the package sees."""

from fedtail.models.flat import FlatModel, has_batchnorm
from fedtail.models.mlp import mlp
from fedtail.models.registry import MODELS, build_model

__all__ = ["MODELS", "FlatModel", "build_model", "has_batchnorm", "mlp"]
