"""Which path of the simulator runs clients, and why: settled here, once, before a run.

A fast path proves itself: on a few real samples it must do what the reference path does. Two small clients, whose
batches differ in size so that the fast paths pad them, train for an epoch on both paths with the run's own method, a
learning rate above 0 and weights none of which is 0; their updates, losses and outputs are compared. This takes place
on the CPU in float32, also for a GPU: the code of its paths is the same on both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fedtail.core.records import Task, Update
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.models.device import check_device
from fedtail.models.flat import AverageDraws, FlatModel, copy_module, couples_samples, has_batchnorm, jitter
from fedtail.rates.base import RateStrategy
from fedtail.rounds.evaluation import Split
from fedtail.rounds.plan import batch_of
from fedtail.rounds.state import Engine, Problem
from fedtail.settings import Settings
from fedtail.simulate.batched.choice import choose_cpu_kernel, operations_that_pay
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator, draws_numbers
from fedtail.simulate.workers import forward_flops

log = logging.getLogger("fedtail")

TRIED_GRAIN, TRIED_CHUNK = 4, 1
"""What batches of a few samples are filled up to multiples of, and cut into, when a path is tried: as large ones are in
a run."""

Build = Callable[[Federation, nn.Module, Method, Settings], Engine]
Candidate = tuple[Build, Build]
"""A fast path as it is tried, and as it runs."""
Outcome = tuple[list[Update], Tensor]
"""An engine's updates for a task, and its outputs for some samples."""


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
        stepped_aside = bool(candidates or opaque(module, federation.input_shape))
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
    if reason := opaque(module, federation.input_shape):
        return [], reason
    if engine.path == "graph" or (engine.path == "auto" and engine.device.startswith("cuda")):
        builds = [partial(GraphSimulator, fused=True), partial(GraphSimulator, fused=False)]
        return [(partial(b, grain=TRIED_GRAIN), b) for b in builds], ""
    if engine.device != "cpu":
        return [], f"the batched path runs on the CPU, not on {engine.device}"
    known, reason = choose_cpu_kernel(FlatModel(copy_module(module)), federation, method)
    if known is None:
        return [], reason
    operations = min(batch_of(settings.local), int(federation.sizes.max())) * forward_flops(
        module, federation.input_shape
    )
    if engine.path == "auto" and operations > operations_that_pay(known):
        return [], f"a batch of the model takes {operations:.2g} operations, enough to fill a core"
    reason = f"{reason}, {operations:.2g} operations per batch"
    reason = reason if engine.path == "auto" else "asked for"
    tried = ChunkedKernel(module, federation.input_shape, TRIED_CHUNK) if isinstance(known, ChunkedKernel) else known
    build = partial(BatchedSimulator, reason=reason)
    return [(partial(build, kernel=tried), partial(build, kernel=known))], ""


BATCH = 4
SIZES = (6, 3)
"""Samples of the two clients: batches of 4, 2 and 3."""
LR = 0.05
AGREES = 5e-3
"""Relative difference that is rounding. Batches that leak into each other are off by .01 and more."""
TURNS = 3
"""Choices of samples that may judge, one after another."""
ROUNDING = 1e-6
"""What weights are moved by, as a share of themselves, to see whether samples can judge: sums in another order move
results as far."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def opaque(module: nn.Module, input_shape: tuple[int, ...]) -> str:
    """Why a module is more than its layers and their weights, so that no comparison on a few samples settles what it
    does; empty if it is not."""
    for name, layer in module.named_modules():
        place = f"layer {name!r}" if name else "the model"
        if any(getattr(layer, kind, None) for kind in HOOKS):
            return f"{place} has a hook"
        if parametrize.is_parametrized(layer):
            return f"{place} has a parametrization"
        if "forward" in vars(layer):
            return f"{place} has a forward method of its own"
    return rewritten(module, input_shape)


def rewritten(module: nn.Module, input_shape: tuple[int, ...]) -> str:
    """What a training pass changes that fast paths, which share a module among clients, would not give back: it counts
    in whole numbers, or puts another tensor in the place of a weight or a buffer; empty if it does neither."""
    trial = copy_module(module).train()
    weights = [(name, p, p.data_ptr()) for name, p in trial.named_parameters()]
    buffers = [(m, name, b, b.clone()) for m in trial.modules() for name, b in m.named_buffers(recurse=False)]
    x = torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(0)).to(next(trial.parameters()).device)
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
        try:
            trial(x)
        except Exception:  # the user's module: whoever trains it will say so
            return ""
    for name, p, place in weights:
        if p.data_ptr() != place:
            return f"a training pass puts another tensor in the place of {name!r}"
    for layer, name, b, before in buffers:
        if layer._buffers[name] is not b:
            return f"a training pass puts another tensor in the place of {name!r}"
        unread = isinstance(layer, _BatchNorm) and layer.momentum is not None
        if not (b.is_floating_point() or unread or torch.equal(b, before)):
            return f"a training pass counts in {name!r}"
    return ""


def disagreement(build: Build, federation: Federation, module: nn.Module, method: Method, settings: Settings) -> str:
    """Why the engine that ``build`` makes may not take the run; empty if it does what the reference path does.

    Where they differ on samples on which the reference path differs from itself as soon as its weights are rounded
    otherwise (an activation lies at the kink of a ReLU, say), other samples judge.
    """
    module, settings, reason = copy_module(module).cpu(), _on_cpu(settings), ""
    draws = draws_numbers(module, federation.input_shape)
    with torch.random.fork_rng(devices=[]), AverageDraws() if draws else nullcontext():
        for turn in range(TURNS):
            reason, steady = _compared(build, few_samples(federation, turn), module, method, settings)
            if steady:
                break
        if not reason and not has_batchnorm(module) and couples_samples(module, federation.input_shape):
            reason = "samples of a batch influence each other, or a batch changes buffers"  # less than AGREES shows
    return reason


def _compared(
    build: Build, trial: Federation, module: nn.Module, method: Method, settings: Settings
) -> tuple[str, bool]:
    """Why the engine may not take the run by these samples, and whether they can judge."""

    def reference() -> ReferenceSimulator:
        torch.manual_seed(0)
        return ReferenceSimulator(trial, copy_module(module), method, settings)

    try:
        engine = reference()
        task = _task(engine, method, settings)
        expected = _outcome(engine, task)
    except Exception as error:  # the model or the method, which may be the user's own
        return f"it cannot be tried on {sum(SIZES)} samples ({_named(error)})", True
    try:
        fast = build(trial, copy_module(module), method, settings)
        found = _outcome(fast, task)
        fast.close()
    except Exception as error:
        return f"it fails on {sum(SIZES)} samples ({_named(error)})", True
    reason = _difference(expected, found)
    if not reason:
        return "", True
    rounding = torch.randn(task.x.shape, generator=torch.Generator().manual_seed(2))
    otherwise = _outcome(reference(), replace(task, x=task.x * (1 + ROUNDING * rounding)))
    return reason, not _difference(expected, otherwise)


def _difference(expected: Outcome, found: Outcome) -> str:
    """What of two outcomes is further apart than rounding takes it; empty if nothing is."""
    (updates, logits), (others, answers) = expected, found
    if len(others) != len(updates):
        return "it refuses other clients than the reference path"
    pairs = [("updates", a.delta, b.delta) for a, b in zip(updates, others, strict=True)]
    pairs += [("losses", torch.tensor(a.loss), torch.tensor(b.loss)) for a, b in zip(updates, others, strict=True)]
    for what, a, b in [*pairs, ("outputs", logits, answers)]:
        apart = float((a - b).norm() / a.norm().clamp_min(1e-30))
        if not apart <= AGREES:
            return f"its {what} on {sum(SIZES)} samples differ from the reference path's by {apart:.0%}"
    return ""


def few_samples(federation: Federation, turn: int = 0) -> Federation:
    """Two clients with some of the federation's training samples, of as many classes as there are; others each turn."""
    samples, n = list[np.ndarray](), 0
    for rows in federation.train:
        samples.append(rows[:200])
        n += len(samples[-1])
        if n >= 1000:
            break
    rows = np.concatenate(samples)
    labels = federation.pool.y.numpy()[rows]
    # the first of every class, then the second of every class, and so on
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], labels[order])
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows)) - starts
    mixed = rows[np.argsort(place, kind="stable")]
    chosen = np.resize(np.roll(mixed, -turn * sum(SIZES)), sum(SIZES))
    first, second = np.arange(SIZES[0]), np.arange(SIZES[0], sum(SIZES))
    pool = federation.pool.take(chosen)
    return Federation(
        pool,
        train=(first, second),
        validation=(second, first),
        test=pool.take(second),
        classes=federation.classes,
        sites=("first", "second"),
        transform=federation.transform,
        augment=federation.augment,
        background=federation.background,
    )


def _on_cpu(settings: Settings) -> Settings:
    local = settings.local.model_copy(update={"batch_size": BATCH, "epochs": 1})
    engine = settings.engine.model_copy(update={"device": "cpu", "precision": "fp32", "workers": 1})
    return settings.model_copy(update={"local": local, "engine": engine})


def _task(engine: ReferenceSimulator, method: Method, settings: Settings) -> Task:
    """A round of both clients, with what the method's server has to say."""
    model, f = engine.model, engine.federation
    x, draws = model.vector.clone(), torch.Generator().manual_seed(1)
    jitter(x[: model.n_params].split([int(np.prod(s)) for s in model.shapes]), torch.Generator().manual_seed(0))
    weights = engine.sizes / engine.sizes.sum()

    def auxiliary(x: Tensor) -> Tensor:
        return torch.randn(f.n_classes, *model.output_layer()[1], generator=draws)

    problem = Problem(engine, method, RateStrategy(), f.n_classes, auxiliary=auxiliary, background=f.background)
    server = problem.view(settings, x, 0, weights, LR)
    state = method.before_round(server, method.init_server(f.n_clients, f.n_classes, model.n_params))
    clients = tuple(range(f.n_clients))
    return Task(
        round=0,
        x=x,
        clients=clients,
        probes={"rate": np.zeros((f.n_clients, 1))},
        lr=LR,
        broadcast=method.broadcast(state),
        messages={k: m for k in clients if (m := method.message(state, k))},
        weights=weights,
    )


def _outcome(engine: Engine, task: Task) -> Outcome:
    updates, refused = engine.train(task)
    if refused:
        raise ValueError(refused[0].reason)
    federation: Federation = engine.federation  # type: ignore[attr-defined]
    split = Split.of(federation, federation.train[-1])
    return updates, torch.cat([z for z, _ in engine._logits(task.x, split)])  # type: ignore[attr-defined]


def _named(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
