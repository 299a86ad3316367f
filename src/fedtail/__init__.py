"""fedtail: federated learning when the class that matters is rare."""

from fedtail import data, datasets, methods, optim, rates
from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.data import Federation, partition
from fedtail.errors import FedtailError
from fedtail.runs.execution import Result, fit
from fedtail.runs.saved import SavedModel, load_model

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
