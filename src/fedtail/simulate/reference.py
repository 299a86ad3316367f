"""The reference simulator: clients one after another, nothing clever. Fast paths are tested against it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.core.candidates import Candidates
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.data.federation import Federation
from fedtail.methods.base import Method
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import (
    Logits,
    Split,
    confusion_on,
    count_candidates,
    federation_split,
    model_logits,
)
from fedtail.rounds.local import DivergedError, measure_client, train_client
from fedtail.settings import Settings
from fedtail.simulate.client_states import ClientStates
from fedtail.simulate.scoring import Scoring

T = TypeVar("T")


class ReferenceSimulator(ClientStates, Scoring):
    """Every client in this process. With ``workers`` > 1 several clients run at once, each on a model of its own;
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
        super().__init__()
        self.federation, self.method, self.settings = federation, method, settings
        self.device, self.reason = torch.device(settings.engine.device), reason
        workers = settings.engine.workers
        # torch's CPU generator is one per process, so models that draw from it run one client at a time
        self.workers = 1 if workers <= 1 or draws_numbers(module, federation.input_shape) else workers
        model = FlatModel(module.to(self.device))
        self.models = [model, *(model.clone() for _ in range(self.workers - 1))]
        self.n_clients, self.sizes = federation.n_clients, federation.sizes

    @property
    def model(self) -> FlatModel:
        return self.models[0]

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        all_samples = max(sum(int(self.sizes[k]) for k in task.clients), 1)

        def one(model: FlatModel, row: int) -> tuple[Update, list[Tensors]] | Refusal:
            k = task.clients[row]
            mine = replace(task, advance=lambda part: task.advance(part * self.sizes[k] / all_samples))
            client, before = self.federation.client(k), self.client_states.get(k, {})
            try:
                return train_client(model, client, self.method, mine, row, before, self.settings)
            except DivergedError as error:
                return Refusal(k, task.round, str(error))

        updates, refusals = [], []
        for outcome in self._map(one, range(len(task.clients))):
            if isinstance(outcome, Refusal):
                refusals.append(outcome)
            else:
                update, states = outcome
                updates.append(update)
                self._pending[update.client] = states
        return updates, refusals

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        rows = np.concatenate([self.federation.validation[k] for k in clients])
        return count_candidates(self.model, candidates, Split.of(self.federation, rows))

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        return confusion_on(self.model, federation_split(self.federation, split))(x)

    def _logits(self, x: Tensor, split: Split) -> Logits:
        return model_logits(self.model, x, split.batches(device=self.model.vector.device))

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        values = self._map(
            lambda model, k: measure_client(model, self.federation.client(k), x, what), range(self.n_clients)
        )
        return dict(enumerate(values))

    def info(self) -> dict[str, Any]:
        return {
            "engine": "simulator",
            "path": self.path,
            "reason": self.reason,
            "device": str(self.device),
            "workers": self.workers,
        }

    def close(self) -> None:
        self._pending.clear()

    def _map(self, work: Callable[[FlatModel, int], T], items: Sequence[int]) -> list[T]:
        """Results in the order of ``items``, whatever worker did them."""
        if self.workers == 1:
            return [work(self.model, i) for i in items]
        with ThreadPoolExecutor(self.workers) as pool:
            shares = [
                pool.submit(lambda m, mine: [(i, work(m, i)) for i in mine], model, list(items)[w :: self.workers])
                for w, model in enumerate(self.models)
            ]
            done = dict(pair for share in shares for pair in share.result())
        return [done[i] for i in items]


def draws_numbers(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a training step takes random numbers from torch, by whatever layer or function: it is tried.

    On inputs that differ: a layer may draw for some values only, as RReLU does for negative ones.
    """
    trial = copy.deepcopy(module).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = torch.rand(16, *input_shape).to(next(trial.parameters()).device)
        before = torch.get_rng_state()
        trial(x)
        return not torch.equal(before, torch.get_rng_state())
