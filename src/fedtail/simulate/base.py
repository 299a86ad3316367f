"""The common base of the simulator's paths: clients' states, what a client sends, and evaluation by logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.evidence import confusion_matrix
from fedtail.core.records import Measurement, Refusal, Task, Tensors, Update
from fedtail.core.scores import Scores
from fedtail.data.federation import Federation
from fedtail.methods.base import Method, cross_entropy
from fedtail.models.flat import FlatModel
from fedtail.rounds.evaluation import (
    Logits,
    Split,
    client_confusions,
    client_splits,
    federation_split,
    probabilities_of,
    scores_on,
)
from fedtail.rounds.local import DivergedError, End, client_update
from fedtail.rounds.plan import PreparedRun, prepare_runs
from fedtail.settings import Settings

T = TypeVar("T")
P = TypeVar("P")
Outcome = tuple[Update, list[Tensors]] | Refusal
"""What a client sends, and the state that it would keep of each probe; or why it sends nothing."""


class Scoring(ABC):
    """Evaluation, from the logits that a path computes."""

    federation: Federation

    @abstractmethod
    def _logits(self, x: Tensor, split: Split) -> Logits:
        """Return the logits of the model ``x`` on a split, and the labels."""

    def _guess(self, x: Tensor, split: Split) -> np.ndarray:
        parts = [z.argmax(-1) for z, _ in self._logits(x, split)]
        return torch.cat(parts).cpu().numpy() if parts else np.empty(0, dtype=np.int64)

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        samples = federation_split(self.federation, split)
        return confusion_matrix(samples.labels, self._guess(x, samples), samples.n_classes)

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        return client_confusions(self.federation, self._guess(x, federation_split(self.federation, "validation")))

    def _each(self, work: Callable[[P], T], pieces: Sequence[P], samples: int) -> list[T]:
        """``work`` of every piece, of so many samples in all, in order; a path may spread it over its workers."""
        return [work(piece) for piece in pieces]

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        def scored(owned: tuple[int, Split]) -> tuple[int, Scores]:
            k, part = owned
            rule = None if decisions is None else decisions.at(k)
            return k, scores_on(self._logits(x, part), part.n_classes, rule)

        yield from self._clients(scored, split)

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        def decided(owned: tuple[int, Split]) -> tuple[int, Decision]:
            k, part = owned
            p, y = probabilities_of(self._logits(x, part), part.n_classes)
            return k, goal.decide(p, y, self.federation.client(k).counts)

        return dict(self._clients(decided, "validation"))

    def _clients(self, work: Callable[[tuple[int, Split]], T], split: str) -> list[T]:
        owned = list(client_splits(self.federation, split))
        return self._each(work, owned, sum(len(part) for _, part in owned))

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        split = self._held(clients)
        for s, vector in candidates.walk():
            yield s, scores_on(self._logits(vector, split), split.n_classes, tempered=False)

    def _held(self, clients: Sequence[int]) -> Split:
        """The private splits of some clients together."""
        return Split.of(self.federation, np.concatenate([self.federation.validation[k] for k in clients]))


class Simulator(Scoring):
    """Clients of a method in this process; a round offers a state of each probe, of which ``commit`` takes one."""

    path = ""
    takes_rivals = True
    models: list[FlatModel]
    """One for each worker that has been at work."""

    def __init__(self, federation: Federation, method: Method, settings: Settings, reason: str) -> None:
        self.federation, self.method, self.settings, self.reason = federation, method, settings, reason
        self.device = torch.device(settings.engine.device)
        self.n_clients, self.sizes = federation.n_clients, federation.sizes
        self.client_states: dict[int, Tensors] = {}
        self._pending: dict[int, list[Tensors]] = {}

    @property
    def model(self) -> FlatModel:
        return self.models[0]

    def commit(self, choice: dict[int, int]) -> None:
        for k, probe in choice.items():
            if k in self._pending and self._pending[k][probe]:
                self.client_states[k] = self._pending[k][probe]
        self._pending.clear()

    def state(self) -> dict[int, Tensors]:
        return self.client_states

    def load_state(self, state: dict[int, Tensors]) -> None:
        self.client_states = {k: {n: t.to(self.device) for n, t in v.items()} for k, v in state.items()}

    def info(self) -> dict[str, Any]:
        return {"engine": "simulator", "path": self.path, "reason": self.reason, "device": str(self.device)}

    def _prepared(self, model: FlatModel, task: Task, row: int) -> list[PreparedRun]:
        """A client's local runs before their first step."""
        client = self.federation.client(task.clients[row])
        before = self.client_states.get(client.index, {})
        return prepare_runs(model, client, self.method, task, row, before, self.settings)

    def _outcome(self, task: Task, row: int, ends: Sequence[End]) -> Outcome:
        """Return a client's upload after its local runs, one of each probe."""
        client, before = self.federation.client(task.clients[row]), self.client_states.get(task.clients[row], {})
        trained, held = Split.of(client, client.train), Split.of(client, client.validation)
        try:
            return client_update(
                task,
                client,
                self.method,
                ends,
                before,
                self.settings.run.metric,
                lambda models: self._losses(models, trained).mean(1).cpu().numpy().astype(np.float64),
                lambda models: self._logits_each(models, held),
            )
        except DivergedError as error:
            return Refusal(client.index, task.round, str(error), error.code)

    def _logits_each(self, models: Tensor, split: Split) -> Sequence[Logits]:
        """``_logits`` of several models (m, n)."""
        return [self._logits(x, split) for x in models]

    def _losses(self, models: Tensor, split: Split) -> Tensor:
        """(m, len(split)) unweighted cross-entropy of each sample under models (m, n)."""
        each = [[cross_entropy(z, y) for z, y in logits] for logits in self._logits_each(models, split)]
        return torch.stack([torch.cat(parts) if parts else torch.empty(0) for parts in each])

    def measure(self, x: Tensor, what: Measurement) -> dict[int, Tensor]:
        out = {}
        for client in map(self.federation.client, range(self.n_clients)):
            split = Split.of(client, client.train)
            seen: tuple[Tensor, ...]
            if what.of_features:
                seen = self.model.features(x, split.batches(device=self.model.vector.device))
            else:
                seen = self._losses(x.unsqueeze(0), split)[0].double(), torch.as_tensor(client.labels)
            out[client.index] = what.function(*(t.cpu() for t in seen), client.n_classes)
        return out

    def _settle(self, outcomes: Sequence[Outcome]) -> tuple[list[Update], list[Refusal]]:
        """Updates and refusals, with the states that clients would keep held for ``commit``."""
        updates, refusals = [], []
        for outcome in outcomes:
            if isinstance(outcome, Refusal):
                refusals.append(outcome)
            else:
                update, states = outcome
                updates.append(update)
                self._pending[update.client] = states
        return updates, refusals
