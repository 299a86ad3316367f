"""fedtail: federated learning when the class that matters is rare."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtail.errors import FedtailError as FedtailError
from fedtail.version import VERSION

if TYPE_CHECKING:
    from fedtail import data as data
    from fedtail import datasets as datasets
    from fedtail import methods as methods
    from fedtail import optim as optim
    from fedtail import rates as rates
    from fedtail.core.grouping import group_classes as group_classes
    from fedtail.core.resampling import resampled_counts as resampled_counts
    from fedtail.data import Federation as Federation
    from fedtail.data import partition as partition
    from fedtail.report import write_run_report as write_run_report
    from fedtail.report.life import write_life_report as write_life_report
    from fedtail.runs.classifier import FederatedClassifier as FederatedClassifier
    from fedtail.runs.evaluate import evaluate as evaluate
    from fedtail.runs.execution import fit as fit
    from fedtail.runs.explain import importance as importance
    from fedtail.runs.judged import judge as judge
    from fedtail.runs.monitor import Watch as Watch
    from fedtail.runs.recalibrate import recalibrate as recalibrate
    from fedtail.runs.result import Result as Result
    from fedtail.runs.saved import SavedModel as SavedModel
    from fedtail.runs.saved import load_model as load_model
    from fedtail.study.plan import plan as plan

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


__all__ = sorted([*_HOMES, *_MODULES, "FedtailError"])
