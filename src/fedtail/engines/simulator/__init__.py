"""The in-process simulator: a plain reference path, and fast paths tested against it."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedtail.core.errors import one_of
from fedtail.data.federation import Federation
from fedtail.engines.base import Engine, LocalSettings
from fedtail.engines.simulator.reference import ReferenceSimulator
from fedtail.methods.base import Method

PATHS = ("auto", "reference")


def simulator(
    federation: Federation,
    module: nn.Module,
    method: Method,
    settings: LocalSettings,
    *,
    path: str = "auto",
    **options: Any,
) -> Engine:
    """The simulator on the path asked for; ``auto`` picks the fastest that supports model, method and device."""
    if path not in PATHS:
        raise one_of("simulator path", path, PATHS)
    return ReferenceSimulator(federation, module, method, settings, **options)


__all__ = ["PATHS", "ReferenceSimulator", "simulator"]
