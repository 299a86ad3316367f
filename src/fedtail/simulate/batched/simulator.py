"""The batched path: all clients and probes of a round in one step, for models too small to fill a core.

A step of a small model is mostly overhead: Python, autograd, memory. Here one step moves every run of the round
(``network``, or ``functional`` for models it does not know), and the step itself is captured once and replayed
(``programs``, ``capture``). A round is cut into shards (``shards``), which workers train (``training``, ``workers``).
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
from fedtail.core.records import Refusal, Task, Update
from fedtail.data.federation import Federation, Transform
from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.rounds.evaluation import LOSSES, Logits, Split, federation_split
from fedtail.rounds.plan import PreparedRun, draw_width
from fedtail.settings import Settings
from fedtail.simulate.base import End, Outcome
from fedtail.simulate.batched.choice import choose_cpu_kernel
from fedtail.simulate.batched.chunks import ChunkedKernel
from fedtail.simulate.batched.network import Network
from fedtail.simulate.batched.pooled import Pooled
from fedtail.simulate.batched.programs import CAPTURE_AFTER, Programs
from fedtail.simulate.batched.shards import cut_round, padding, runs_in_a_shard, runs_in_chunks, short_batches_pay
from fedtail.simulate.batched.step import AnyKernel
from fedtail.simulate.batched.training import alike, train_shard
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
            capture_after, kernel.spread = math.inf, self.pool.map
            self._least = math.inf  # chunks have no padding to save
        self.pooled = Pooled(self._spread, self.sample_flops)
        self.padding: dict[str, float] = {}
        """What the last round computed for nothing; see ``shards.padding``."""
        self._splits: dict[str, Split] = {}
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
                with torch.enable_grad():
                    return super().train(task)
            steps, advance = max(sum(r.local.steps for r in runs), 1), by_caller(task.advance)
            counted = replace(task, advance=lambda n: advance(n / steps))
            shards = cut_round(runs, self._labels, self.n_groups, self.shard, self._least)
            self.programs.prepare(shards, task)
            self.padding = {} if isinstance(self.kernel, ChunkedKernel) else padding(shards)
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
        return sorted((run for mine in runs for run in mine), key=lambda r: -r.local.steps)

    def _collect(
        self, task: Task, runs: Sequence[PreparedRun], ends: Sequence[End], operations: float
    ) -> tuple[list[Update], list[Refusal]]:
        place = {(r.row, r.probe): i for i, r in enumerate(runs)}

        def one(worker: int, row: int) -> Outcome:
            mine = [place[row, p] for p in range(task.n_probes)]
            return self._outcome(task, row, [runs[i] for i in mine], [ends[i] for i in mine])

        return self._settle(self._work(one, range(len(task.clients)), operations))

    # -- evaluation -----------------------------------------------------------------------------------

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        return class_counts(self.pooled.candidate_confusions(candidates, self._held(clients)))

    def _logits(self, x: Tensor, split: Split) -> Logits:
        return self._logits_each(x.unsqueeze(0), split)[0]

    def _logits_each(self, models: Tensor, split: Split) -> Sequence[Logits]:
        return self.pooled.logits_each(models, split)

    def _losses(self, models: Tensor, split: Split) -> Tensor:
        return self.pooled.losses(models, split)

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        if split not in self._splits:
            self._splits[split] = federation_split(self.federation, split)
        return self.pooled.confusions(x.unsqueeze(0), self._splits[split])[0]

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        f = self.federation
        if what not in LOSSES:
            return super().measure(x, what)
        rows = np.concatenate(f.train)
        each = self._losses(x.unsqueeze(0), Split.of(f, rows))[0].double().numpy()
        owner = np.repeat(np.arange(self.n_clients), self.sizes)
        if what == "train_loss":
            means = np.bincount(owner, each, minlength=self.n_clients) / self.sizes
            return dict(enumerate(torch.from_numpy(means)))
        cells = owner * f.n_classes + f.pool.y.numpy()[rows]
        with np.errstate(invalid="ignore"):
            table = np.bincount(cells, each, self.n_clients * f.n_classes) / np.bincount(
                cells, minlength=self.n_clients * f.n_classes
            )
        return dict(enumerate(torch.from_numpy(table.reshape(self.n_clients, f.n_classes))))

    def info(self) -> dict[str, Any]:
        notes = self.programs.notes()
        return {
            "engine": "simulator",
            "path": self.path,
            "reason": self.reason,
            "device": "cpu",
            **self.pool.info(),
            "kernel": type(self.kernel).__name__,
            "shard": self.shard,
            **({"padding": round(self.padding["samples"], 4)} if self.padding else {}),
            "steps": "+".join(self.programs.modes()) or "none yet",
            **({"notes": notes} if notes else {}),
            **({"fallbacks": dict(self._fallbacks)} if self._fallbacks else {}),
        }
