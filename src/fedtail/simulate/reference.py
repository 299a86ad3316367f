"""The reference simulator: clients one after another, nothing clever. Fast paths are tested against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.records import Refusal, Task, Update
from fedtail.data.federation import Federation
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel, copy_module
from fedtail.rounds.evaluation import Logits, Split, count_candidates, model_logits
from fedtail.rounds.local import DivergedError, train_client
from fedtail.rounds.plan import batch_of
from fedtail.settings import Settings
from fedtail.simulate.base import Outcome, Simulator
from fedtail.simulate.workers import Workers, by_caller, forward_flops

T = TypeVar("T")
P = TypeVar("P")

STEP_PAYS = 4e7
"""Operations of a client's step that keep one more worker busy: the rest of it is Python, which one thread runs at a
time (measured: two workers are 1.3 times one at as many, 1.6 at three times, 1.9 at fifteen times as many)."""


class ReferenceSimulator(Simulator):
    """Every client in this process, one after another or, on a CPU's cores, some at once, each on a model of its own;
    since every draw is keyed by client and round, the result does not depend on it."""

    path = "reference"

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        method: Method,
        settings: Settings,
        *,
        reason: str = "asked for",
    ) -> None:
        super().__init__(federation, method, settings, reason)
        self.models = [FlatModel(module.to(self.device))]
        self.sample_flops = forward_flops(module, federation.input_shape)
        """Operations of the forward pass of one sample."""
        self.pool = self._workers(module)

    def _workers(self, module: nn.Module) -> Workers:
        batch = min(batch_of(self.settings.local), int(self.sizes.max()))
        most = 3.0 * batch * self.sample_flops / STEP_PAYS if self.device.type == "cpu" else 1
        workers = Workers(self.settings.engine.workers, most=most)
        # torch's CPU generator is one per process, so models that draw from it run one client at a time
        return Workers(1) if workers.n > 1 and draws_numbers(module, self.federation.input_shape) else workers

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        all_samples, advance = max(sum(int(self.sizes[k]) for k in task.clients), 1), by_caller(task.advance)

        def trained(model: FlatModel, row: int) -> Outcome:
            k = task.clients[row]
            own = replace(task, advance=lambda part: advance(part * self.sizes[k] / all_samples))
            client, before = self.federation.client(k), self.client_states.get(k, {})
            try:
                return train_client(model, client, self.method, own, row, before, self.settings)
            except DivergedError as error:
                return Refusal(k, task.round, str(error), error.code)

        # the largest clients first, so that no worker is left with one at the end
        order = np.argsort([-int(self.sizes[k]) for k in task.clients], kind="stable").tolist()
        outcomes = dict(zip(order, self._map(trained, order), strict=True))
        return self._settle([outcomes[row] for row in range(len(task.clients))])

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        split = self._held(clients)
        operations = float(len(candidates) * len(split) * self.sample_flops)
        n = self.pool.used(len(split.parts()), operations)
        # each worker walks all candidates over its share of the batches: counts add up, whoever counted
        counts = self._map(lambda m, w: count_candidates(m, candidates, split.share(w, n)), range(n), operations)
        return np.sum(counts, axis=0)

    def _logits(self, x: Tensor, split: Split) -> Logits:
        def logits(model: FlatModel, part: slice) -> tuple[Tensor, Tensor]:
            return next(model_logits(model, x, [split.batch(part, model.vector.device)]))

        return self._map(logits, split.parts(), len(split) * self.sample_flops)

    def info(self) -> dict[str, Any]:
        return {**super().info(), **self.pool.info()}

    def close(self) -> None:
        self._pending.clear()
        self.pool.close()

    def _each(self, work: Callable[[P], T], pieces: Sequence[P], samples: int) -> list[T]:
        return self._map(lambda model, piece: work(piece), pieces, float(samples * self.sample_flops))

    def _map(self, work: Callable[[FlatModel, P], T], pieces: Sequence[P], operations: float = math.inf) -> list[T]:
        """Results in the order of ``pieces``, whatever worker did them on whatever model."""
        while len(self.models) < self.pool.used(len(pieces), operations):
            self.models.append(self.model.clone())
        return self.pool.map(lambda worker, piece: work(self.models[worker], piece), pieces, operations)


def draws_numbers(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a training step takes random numbers from torch, by whatever layer or function: it is tried.

    On inputs that differ: a layer may draw for some values only, as RReLU does for negative ones.
    """
    trial = copy_module(module).train()
    device = next(trial.parameters()).device
    devices = [device] if device.type == "cuda" else []

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]

    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        x = torch.rand(16, *input_shape).to(device)
        before = state()
        trial(x)
        return not all(map(torch.equal, before, state()))
