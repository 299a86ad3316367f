"""The batched path: all clients and probes of a round in one step, for models too small to fill a core.

A step of a small model is mostly overhead: Python, autograd, memory. Here one step moves every run of the round
(``network``, or ``choice.FunctionalKernel`` for models it does not know), and the step itself is captured once and
replayed (``programs``, ``capture``). A round is cut into shards (``cohort``), which workers train (``workers``).
What the path does not take goes to the reference path, which it is tested against.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.evidence import class_counts
from fedtail.core.random import torch_seed
from fedtail.core.records import Measurement, Refusal, Task, Tensors, Update
from fedtail.data.federation import Federation, Transform
from fedtail.data.images.augment import apply_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.rounds.evaluation import Logits, Split
from fedtail.rounds.local import End
from fedtail.rounds.plan import PreparedRun, draw_width
from fedtail.settings import Settings
from fedtail.simulate.base import Outcome
from fedtail.simulate.batched.choice import choose_cpu_kernel
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.cohort import (
    Cohort,
    Shard,
    cut_round,
    ladder,
    runs_in_a_shard,
    runs_in_chunks,
    short_batches_pay,
    stretches,
)
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.pooled import Pooled
from fedtail.simulate.batched.programs import CAPTURE_AFTER, Feed, Programs, Runner
from fedtail.simulate.batched.step import AnyKernel
from fedtail.simulate.reference import ReferenceSimulator
from fedtail.simulate.workers import Workers, by_caller, one_thread

T = TypeVar("T")
R = TypeVar("R")


class BatchedSimulator(ReferenceSimulator):
    """Results agree with the reference path up to rounding, and with themselves bit for bit."""

    path = "batched"

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        method: Method,
        settings: Settings,
        *,
        kernel: AnyKernel | None = None,
        capture_after: float = CAPTURE_AFTER,
        reason: str = "asked for",
    ) -> None:
        """``kernel``: of ``choose_cpu_kernel``, if it has been asked; ``capture_after``: calls of a step from which on
        it is captured."""
        super().__init__(federation, module, method, settings, reason=reason)
        if kernel is None:
            kernel, why = choose_cpu_kernel(self.model, federation, method)
            if kernel is None:
                raise FedtailError(f"engine.path = 'batched' cannot handle this run: {why}; set engine.path to 'auto'")
        self.kernels: list[AnyKernel] = [kernel]
        """One for each worker that has been at work: a module cannot answer for two models at once."""
        self.n_groups = method.group_count(federation.n_classes)
        self._labels = federation.pool.y.numpy()
        self.shard = runs_in_a_shard(federation, settings, self.sample_flops)
        """Most runs in one step of this model."""
        self._least = short_batches_pay(self.sample_flops)
        if isinstance(kernel, ChunkedKernel):
            self.shard = runs_in_chunks(federation, settings, self.model.n_params)
            capture_after, kernel.spread, kernel.workers = math.inf, self.pool.map, self.pool.n
            self._least = math.inf  # chunks have no padding to save
        self.pooled = Pooled(self._spread, self.sample_flops)
        self._fallbacks: dict[str, int] = {}
        plain = federation.pool.x.dtype == torch.float32 and federation.transform == Transform()
        self.programs = Programs(
            self.kernels,
            self.model,
            federation,
            method,
            settings,
            capture_after=capture_after,
            pool=federation.pool.x if plain and not draw_width(federation, method) else None,
        )

    def _workers(self, module: nn.Module) -> Workers:
        return Workers(self.settings.engine.workers)

    @property
    def kernel(self) -> AnyKernel:
        return self.kernels[0]

    def _work(self, work: Callable[[int, T], R], pieces: Sequence[T], operations: float) -> list[R]:
        """``Workers.map`` for workers that have kernels."""
        while len(self.kernels) < self.pool.used(len(pieces), operations):
            self.kernels.append(self.kernel if isinstance(self.kernel, Network) else copy.deepcopy(self.kernel))
        return self.pool.map(work, pieces, operations)

    def _spread(self, work: Callable[[AnyKernel, T], R], pieces: Sequence[T], operations: float) -> list[R]:
        return self._work(lambda worker, piece: work(self.kernels[worker], piece), pieces, operations)

    def _each(self, work: Callable[[T], R], pieces: Sequence[T], samples: int) -> list[R]:
        return self._work(lambda worker, piece: work(piece), pieces, float(samples * self.sample_flops))

    # -- training -------------------------------------------------------------------------------------

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        with one_thread(), torch.no_grad():
            operations = 3.0 * task.n_probes * float(sum(self.sizes[k] for k in task.clients)) * self.sample_flops
            if len(task.clients) * task.n_probes <= self.shard:
                operations = 0.0  # one shard for one worker, and what is around it is as small
            runs = self._runs(task, operations)
            if not alike(runs):
                reason = "clients' method states differ in shape"
                self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
                if isinstance(self.kernel, ChunkedKernel) and self.kernel.draws:
                    self.pool = Workers(1)  # who shares torch's generator runs one client at a time
                with torch.enable_grad():
                    return super().train(task)
            steps, advance = max(sum(r.local.steps for r in runs), 1), by_caller(task.advance)
            counted = replace(task, advance=lambda n: advance(n / steps))
            shards = cut_round(runs, self._labels, self.n_groups, self.shard, self._least)
            self.programs.prepare(shards, task)
            ends = self._work(
                lambda worker, shard: train_shard(self.programs, self.federation, worker, shard, counted),
                shards,
                operations,
            )
            return self._collect(task, runs, [end for shard in ends for end in shard], operations)

    def _runs(self, task: Task, operations: float) -> list[PreparedRun]:
        """All local runs of the task, longest first."""
        runs = self._work(
            lambda worker, row: self._prepared(self.model, task, row), range(len(task.clients)), operations
        )
        return sorted((run for own in runs for run in own), key=lambda r: -r.local.steps)

    def _collect(
        self, task: Task, runs: Sequence[PreparedRun], ends: Sequence[End], operations: float
    ) -> tuple[list[Update], list[Refusal]]:
        place = {(r.row, r.probe): i for i, r in enumerate(runs)}

        def outcome(worker: int, row: int) -> Outcome:
            return self._outcome(task, row, [ends[place[row, p]] for p in range(task.n_probes)])

        return self._settle(self._work(outcome, range(len(task.clients)), operations))

    # -- evaluation -----------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        return class_counts(self.pooled.candidate_confusions(candidates, self._held(clients)))

    def _logits(self, x: Tensor, split: Split) -> Logits:
        return self._logits_each(x.unsqueeze(0), split)[0]

    def _logits_each(self, models: Tensor, split: Split) -> Sequence[Logits]:
        return self.pooled.logits_each(models, split)

    def measure(self, x: Tensor, what: Measurement) -> dict[int, Tensor]:
        if what.of_features:
            return super().measure(x, what)
        f, sizes = self.federation, self.sizes.tolist()
        rows = np.concatenate(f.train)
        losses = self._losses(x.unsqueeze(0), Split.of(f, rows))[0].double().split(sizes)
        labels = f.pool.y[torch.as_tensor(rows)].split(sizes)
        return {k: what.function(*seen, f.n_classes) for k, seen in enumerate(zip(losses, labels, strict=True))}

    def info(self) -> dict[str, Any]:
        notes = self.programs.notes()
        return {
            **super().info(),
            "kernel": type(self.kernel).__name__,
            "shard": self.shard,
            "steps": "+".join(self.programs.modes()) or "none yet",
            **({"notes": notes} if notes else {}),
            **({"fallbacks": dict(self._fallbacks)} if self._fallbacks else {}),
        }


def train_shard(programs: Programs, federation: Federation, worker: int, shard: Shard, task: Task) -> list[End]:
    """How each of a shard's runs ends."""
    runs = shard[0].runs
    n_runs, start = len(runs), task.x[: programs.model.n_params]
    if isinstance(kernel := programs.kernels[worker], ChunkedKernel):
        kernel.seed([torch_seed(r.local.seed, "dropout", r.local.client, r.local.round) for r in runs])
    const, state = _stack([r.const for r in runs]), _stack([r.state for r in runs])
    searched = programs.signature(shard[0], task).searched
    rows = {
        "x0": start.unsqueeze(0),
        "lr": torch.tensor([r.hyper["lr"] for r in runs]).unsqueeze(1),
        **{f"hyper.{k}": torch.tensor([r.hyper[k] for r in runs]) for k in searched},
        **{f"const.{k}": v for k, v in const.items()},
    }
    carried = {"x": start.expand(n_runs, -1), **{f"state.{k}": v for k, v in state.items()}}
    delta = torch.empty(n_runs, programs.model.n_params)
    delta[int(shard[0].active[0]) if len(shard[0]) else 0 :] = 0.0  # runs without a step
    means, coming = [], [int(part.active[0]) if len(part) else 0 for part in shard[1:]] + [0]
    for part, after in zip(shard, coming, strict=True):
        signature, runner = programs.signature(part, task), None
        loss = torch.zeros(len(part), n_runs, signature.columns)
        for first, last, n in stretches(part.active):
            size = ladder(n, n_runs)
            if runner is None or size < runner.rows:
                runner = programs.runner(worker, (signature, size), runs[0])
                runner.follow()
                _set(runner.inputs, {**rows, **carried})
                rows |= {k: runner.inputs[k] for k in rows}
                carried = {k: runner.inputs[k] for k in carried}
                feed = Feed(
                    part.index[:, :size].flatten(1), part.labels[:, :size], part.shares[:, :size], loss[:, :size]
                )
            if runner.stretch is not None:
                runner.stretch(feed, first, last)
            else:
                _one_by_one(programs, federation, runner, feed, part, first, last)
            task.advance(n * (last - first))
            left = int(part.active[last]) if last < len(part) else after
            if left < n:
                torch.sub(carried["x"][left:n], start, out=delta[left:n])
                for k, final in state.items():
                    final[left:n] = carried[f"state.{k}"][left:n]
        means.append(loss.mul_(part.shares[:, :, 0]).sum(-1))
    each = torch.cat(means).T.contiguous().numpy()
    return [
        End(delta[i], each[i, : r.local.steps], _row(const, i), _row(state, i), r.local) for i, r in enumerate(runs)
    ]


def _one_by_one(
    programs: Programs, federation: Federation, runner: Runner, feed: Feed, cohort: Cohort, first: int, last: int
) -> None:
    """The steps from one to another: their batches go into the runner's tensors, their losses where they belong."""
    rows, pool, transform = runner.rows, federation.pool.x, federation.transform
    inputs, labels, shares = runner.inputs["inputs"], runner.packed["labels"], runner.packed["shares"]
    flat = inputs.view(-1, *pool.shape[1:])
    for s in range(first, last):
        if programs.pool is not None:
            torch.index_select(pool, 0, feed.rows[s], out=flat)
        else:
            x = transform(pool.index_select(0, feed.rows[s]))
            if cohort.draws is not None:
                x = apply_augment(x, cohort.draws[s, :rows].flatten(0, 1))
            inputs.copy_(x.reshape(inputs.shape))
        labels.copy_(feed.labels[s])
        shares.copy_(feed.shares[s])
        feed.loss[s].copy_(runner.run())


def alike(runs: Sequence[PreparedRun]) -> bool:
    """Whether the method's tensors are of the same shapes in all runs, so that they can be stacked."""

    def shapes(run: PreparedRun) -> list[dict[str, torch.Size]]:
        return [{k: v.shape for k, v in tensors.items()} for tensors in (run.const, run.state)]

    return all(shapes(run) == shapes(runs[0]) for run in runs)


def _stack(each: list[Tensors]) -> Tensors:
    return {k: torch.stack([e[k] for e in each]) for k in each[0]} if each else {}


def _row(tensors: Tensors, i: int) -> Tensors:
    return {k: v[i] for k, v in tensors.items()}


def _set(place: Tensors, values: Tensors) -> None:
    """Copy the rows that fit, where they are not there already."""
    for name, value in values.items():
        if value is not place[name]:
            place[name].copy_(value[: len(place[name])])
