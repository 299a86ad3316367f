"""The in-process simulator: a plain reference path, and fast paths tested against it."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedtail.data.federation import Federation
from fedtail.errors import FedtailError, one_of
from fedtail.methods.base import Method
from fedtail.models.device import check_device
from fedtail.rounds.engine import Engine, LocalSettings
from fedtail.simulate.batched.choice import batched_pays
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator
from fedtail.simulate.sharded import ShardedSimulator, join_ranks, world_size

PATHS = ("auto", "reference", "batched", "graph")

SWITCH = {"auto": None, "on": True, "off": False, None: None, True: True, False: False}


def simulator(
    federation: Federation,
    module: nn.Module,
    method: Method,
    settings: LocalSettings,
    *,
    path: str = "auto",
    rounds: int | None = None,
    threads: int = 1,
    compile: str | bool | None = "auto",
    **options: Any,
) -> Engine:
    """The simulator on the path asked for; ``auto`` picks the fastest that supports model, method and device.

    ``rounds`` and ``threads`` are for the batched path: the run's length, if known, and torch's threads while
    clients train. ``compile``: whether steps are compiled (``auto``, ``on``, ``off``). Under ``torchrun`` clients are
    spread over the processes, one device each.
    """
    if compile not in SWITCH:
        raise one_of("engine.compile", compile, [k for k in SWITCH if isinstance(k, str)])
    if path not in PATHS:
        raise one_of("engine.path", path, PATHS)
    check_device("engine.device", options.get("device", "cpu"))
    if world_size() > 1:
        options["device"] = join_ranks(options.get("device", "cpu"))
    inner = _on_one_device(federation, module, method, settings, path, rounds, threads, SWITCH[compile], options)
    return ShardedSimulator(inner) if world_size() > 1 else inner


def _on_one_device(
    federation: Federation,
    module: nn.Module,
    method: Method,
    settings: LocalSettings,
    path: str,
    rounds: int | None,
    threads: int,
    compile: bool | None,
    options: dict[str, Any],
) -> Engine:
    on_gpu = str(options.get("device", "cpu")).startswith("cuda")
    if path == "graph" or (path == "auto" and on_gpu and has_heavy_layers(module)):
        return GraphSimulator(federation, module, method, settings, compile=compile, **options)
    if (precision := options.pop("precision", "auto")) not in ("auto", "fp32"):
        raise FedtailError(f"engine.precision = {precision!r} needs the graph path; set engine.path to 'graph'")
    on_cpu = str(options.get("device", "cpu")) == "cpu"
    if path == "batched" and not on_cpu:
        raise FedtailError(f"engine.path = 'batched' runs on the CPU, not on {options['device']}; set it to 'auto'")
    if path in ("auto", "batched") and on_cpu:
        pays, reason = True, "asked for"
        if path == "auto":
            pays, reason = batched_pays(module, federation, method, settings.batch_size)
        if pays:
            return BatchedSimulator(
                federation, module, method, settings, threads=threads, compile=compile, rounds=rounds, reason=reason
            )
        options["reason"] = reason
    return ReferenceSimulator(federation, module, method, settings, **options)


def has_heavy_layers(module: nn.Module) -> bool:
    """Convolutional or recurrent: such models fill a GPU one by one and lose by being batched over clients."""
    heavy = (nn.modules.conv._ConvNd, nn.RNNBase)
    return any(isinstance(m, heavy) for m in module.modules())


__all__ = ["PATHS", "BatchedSimulator", "GraphSimulator", "ReferenceSimulator", "ShardedSimulator", "simulator"]
