"""The in-process simulator: a plain reference path, and fast paths tested against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedtail.core.errors import FedtailError, one_of
from fedtail.data.federation import Federation
from fedtail.engines.base import Engine, LocalSettings
from fedtail.engines.simulator.graph import GraphSimulator
from fedtail.engines.simulator.reference import ReferenceSimulator
from fedtail.methods.base import Method

PATHS = ("auto", "reference", "graph")


def check_device(name: str) -> None:
    """Raise for a device that torch does not know or that is not there."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise one_of("engine.device", name, ("cpu", "cuda", "cuda:0", "mps")) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise FedtailError(f"engine.device = {name!r} but torch finds no CUDA device; use cpu")


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
        raise one_of("engine.path", path, PATHS)
    check_device(options.get("device", "cpu"))
    on_gpu = str(options.get("device", "cpu")).startswith("cuda")
    if path == "graph" or (path == "auto" and on_gpu and has_heavy_layers(module)):
        return GraphSimulator(federation, module, method, settings, **options)
    if (precision := options.pop("precision", "auto")) not in ("auto", "fp32"):
        raise FedtailError(f"engine.precision = {precision!r} needs the graph path; set engine.path to 'graph'")
    return ReferenceSimulator(federation, module, method, settings, **options)


def has_heavy_layers(module: nn.Module) -> bool:
    """Convolutional or recurrent: such models fill a GPU one by one and lose by being batched over clients."""
    heavy = (nn.modules.conv._ConvNd, nn.RNNBase)
    return any(isinstance(m, heavy) for m in module.modules())


__all__ = ["PATHS", "GraphSimulator", "ReferenceSimulator", "simulator"]
