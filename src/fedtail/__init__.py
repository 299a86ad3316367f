"""fedtail: federated learning when the class that matters is rare."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtail.errors import FedtailError
from fedtail.version import VERSION

if TYPE_CHECKING:
    from fedtail import data, datasets, methods, optim, rates
    from fedtail.core.grouping import group_classes
    from fedtail.core.resampling import resampled_counts
    from fedtail.data import Federation, partition
    from fedtail.report import write_run_report
    from fedtail.report.life import write_life_report
    from fedtail.runs.classifier import FederatedClassifier
    from fedtail.runs.evaluate import evaluate
    from fedtail.runs.execution import fit
    from fedtail.runs.explain import importance
    from fedtail.runs.judged import judge
    from fedtail.runs.monitor import Watch
    from fedtail.runs.recalibrate import recalibrate
    from fedtail.runs.result import Result
    from fedtail.runs.saved import SavedModel, load_model
    from fedtail.study.plan import plan

__version__ = VERSION

_HOMES = {
    "FederatedClassifier": "fedtail.runs.classifier",
    "Federation": "fedtail.data",
    "Result": "fedtail.runs.result",
    "SavedModel": "fedtail.runs.saved",
    "Watch": "fedtail.runs.monitor",
    "evaluate": "fedtail.runs.evaluate",
    "fit": "fedtail.runs.execution",
    "group_classes": "fedtail.core.grouping",
    "importance": "fedtail.runs.explain",
    "judge": "fedtail.runs.judged",
    "load_model": "fedtail.runs.saved",
    "partition": "fedtail.data",
    "plan": "fedtail.study.plan",
    "recalibrate": "fedtail.runs.recalibrate",
    "resampled_counts": "fedtail.core.resampling",
    "write_life_report": "fedtail.report.life",
    "write_run_report": "fedtail.report",
}
_MODULES = ("data", "datasets", "methods", "optim", "rates")


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: torch takes seconds, and ``fedtail --help`` needs none of it."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"fedtail.{name}")
    else:
        raise AttributeError(f"module 'fedtail' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "FederatedClassifier",
    "Federation",
    "FedtailError",
    "Result",
    "SavedModel",
    "Watch",
    "data",
    "datasets",
    "evaluate",
    "fit",
    "group_classes",
    "importance",
    "judge",
    "load_model",
    "methods",
    "optim",
    "partition",
    "plan",
    "rates",
    "recalibrate",
    "resampled_counts",
    "write_life_report",
    "write_run_report",
]
