"""The in-process simulator: a plain reference path, and fast paths tested against it."""

from __future__ import annotations

import copy

from torch import nn

from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.models.device import check_device
from fedtail.models.flat import FlatModel
from fedtail.rounds.batches import batch_of
from fedtail.rounds.engine import Engine
from fedtail.settings import Settings
from fedtail.simulate.batched.choice import batched_pays, choose_kernel
from fedtail.simulate.batched.network import recognise
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.graph.stacked import StackedSimulator
from fedtail.simulate.reference import ReferenceSimulator
from fedtail.simulate.sharded import ShardedSimulator, join_ranks, world_size


def simulator(federation: Federation, module: nn.Module, method: Method, settings: Settings) -> Engine:
    """The simulator on the path that ``engine.path`` names; ``auto`` is the fastest that takes model and method.

    Under ``torchrun`` clients are spread over the processes, one device each.
    """
    check_device("engine.device", settings.engine.device)
    if world_size() == 1:
        return _on_one_device(federation, module, method, settings)
    engine = settings.engine.model_copy(update={"device": join_ranks(settings.engine.device)})
    return ShardedSimulator(_on_one_device(federation, module, method, settings.model_copy(update={"engine": engine})))


def _on_one_device(federation: Federation, module: nn.Module, method: Method, settings: Settings) -> Engine:
    engine = settings.engine
    cuda = engine.device.startswith("cuda")
    if engine.path == "graph" or (engine.path == "auto" and cuda and heavy(module, federation.input_shape)):
        return GraphSimulator(federation, module, method, settings)
    reason = "asked for"
    if cuda and engine.path != "reference":
        kernel, reason = choose_kernel(FlatModel(copy.deepcopy(module)), federation, method)
        if kernel is not None or engine.path == "batched":
            return StackedSimulator(federation, module, method, settings, kernel=kernel, reason=reason)
    elif engine.path == "batched" and engine.device != "cpu":
        raise FedtailError(f"engine.path = 'batched' runs on the CPU and on CUDA, not on {engine.device}; use 'auto'")
    if engine.precision not in ("auto", "fp32"):
        raise FedtailError(f"engine.precision = {engine.precision!r} needs the graph path; set engine.path to 'graph'")
    if engine.path == "auto" and engine.device == "cpu":
        pays, reason = batched_pays(module, federation, method, batch_of(settings.local))
        if pays:
            return BatchedSimulator(federation, module, method, settings, reason=reason)
    elif engine.path == "batched":
        return BatchedSimulator(federation, module, method, settings)
    return ReferenceSimulator(federation, module, method, settings, reason=reason)


def heavy(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Convolutional or recurrent, and not of known layers: such models lose by being batched over clients on a GPU."""
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
    return any(isinstance(m, kinds) for m in module.modules()) and recognise(module, input_shape) is None


__all__ = [
    "BatchedSimulator",
    "GraphSimulator",
    "ReferenceSimulator",
    "ShardedSimulator",
    "StackedSimulator",
    "simulator",
]
