"""fedtail: federated learning when the class that matters is rare."""

from fedtail import data, datasets, methods, optim, rates
from fedtail.core.errors import FedtailError
from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.data import Federation, partition
from fedtail.predict import SavedModel, load_model
from fedtail.run import Result, fit

__version__ = "0.1.0"
__all__ = [
    "Federation",
    "FedtailError",
    "Result",
    "SavedModel",
    "data",
    "datasets",
    "fit",
    "group_classes",
    "load_model",
    "methods",
    "optim",
    "partition",
    "rates",
    "resampled_counts",
]
