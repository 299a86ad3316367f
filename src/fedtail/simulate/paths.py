"""Which path of the simulator runs clients, and why: settled here, once, before a run."""

from __future__ import annotations

import logging
from functools import partial

from torch import nn

from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.models.device import check_device
from fedtail.models.flat import FlatModel, copy_module
from fedtail.rounds.batches import batch_of
from fedtail.rounds.engine import Engine
from fedtail.settings import Settings
from fedtail.simulate.batched.choice import choose_cpu_kernel, operations_that_pay
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.proof import Build, disagreement, opaque
from fedtail.simulate.reference import ReferenceSimulator
from fedtail.simulate.workers import forward_flops

log = logging.getLogger("fedtail")

TRIED_GRAIN, TRIED_CHUNK = 4, 1
"""What batches of a few samples are filled up to multiples of, and cut into, when a path is tried: as large ones are in
a run."""

Candidate = tuple[Build, Build]
"""A fast path as it is tried, and as it runs."""


def simulator(federation: Federation, module: nn.Module, method: Method, settings: Settings) -> Engine:
    """Return the simulator on the path that ``engine.path`` names; ``auto`` is the fastest one that pays and that does
    on a few samples what the reference path does.
    """
    check_device("engine.device", settings.engine.device)
    module.float()  # in which models train on every path
    engine, reason, stepped_aside = settings.engine, "asked for", False
    if engine.path != "reference":
        candidates, reason = fast_paths(federation, module, method, settings)
        for trial, build in candidates:
            reason = disagreement(trial, federation, module, method, settings)
            if not reason:
                return build(federation, module, method, settings)
        stepped_aside = bool(candidates or opaque(module))
    if engine.path not in ("auto", "reference"):
        raise FedtailError(f"engine.path = {engine.path!r} cannot handle this run: {reason}; set engine.path to 'auto'")
    if engine.precision not in ("auto", "fp32"):
        raise FedtailError(f"engine.precision = {engine.precision!r} needs the graph path; set engine.path to 'graph'")
    if stepped_aside:
        log.warning("clients run on the reference path, which is slower: %s", reason)
    return ReferenceSimulator(federation, module, method, settings, reason=reason)


def fast_paths(
    federation: Federation, module: nn.Module, method: Method, settings: Settings
) -> tuple[list[Candidate], str]:
    """Return the fast paths that may take the run, the fastest first, and why there is none."""
    engine = settings.engine
    if reason := opaque(module):
        return [], reason
    if engine.path == "graph" or (engine.path == "auto" and engine.device.startswith("cuda")):
        builds = [partial(GraphSimulator, fused=True), partial(GraphSimulator, fused=False)]
        return [(partial(b, grain=TRIED_GRAIN), b) for b in builds], ""
    if engine.device != "cpu":
        return [], f"the batched path runs on the CPU, not on {engine.device}"
    known, reason = choose_cpu_kernel(FlatModel(copy_module(module)), federation, method)
    if known is None:
        return [], reason
    operations = batch_of(settings.local) * forward_flops(module, federation.input_shape)
    if engine.path == "auto" and operations > operations_that_pay(known):
        return [], f"a batch of the model takes {operations:.2g} operations, enough to fill a core"
    reason = f"{reason}, {operations:.2g} operations per batch"
    reason = reason if engine.path == "auto" else "asked for"
    tried = ChunkedKernel(module, federation.input_shape, TRIED_CHUNK) if isinstance(known, ChunkedKernel) else known
    build = partial(BatchedSimulator, reason=reason)
    return [(partial(build, kernel=tried), partial(build, kernel=known))], ""
