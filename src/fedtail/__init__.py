"""fedtail: federated learning when the class that matters is rare."""

from fedtail import data, datasets, methods, optim, rates
from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.data import Federation, partition
from fedtail.errors import FedtailError
from fedtail.report import write_run_report
from fedtail.runs.execution import fit
from fedtail.runs.result import Result
from fedtail.runs.saved import SavedModel, load_model

__version__ = "0.1.0"
Result.write_page = staticmethod(write_run_report)

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
