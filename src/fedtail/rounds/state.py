"""The problem that is trained, and the whole of a run between two rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.metrics import summarize
from fedtail.core.records import Measurement, Refusal, Task, Tensors, Update
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.methods.base import Method, Server
from fedtail.models.flat import FlatModel
from fedtail.rates.base import RateStrategy
from fedtail.registry import Registry
from fedtail.rounds.evaluation import Split
from fedtail.settings import Settings

Monitor = Callable[[Task, Tensor], dict[str, Any]]
"""(the round's task, the new global model) -> entries for the round's record."""
DIAGNOSTICS: Registry[Monitor] = Registry("diagnostic", "run", group="diagnostics")
"""What ``run.diagnostics`` may name beside those of updates: (federation, model, method, settings) -> monitor."""


@dataclass(frozen=True)
class Best:
    """The model to keep by validation: the latest within half a standard error of the best metric so far.

    Validation splits are small; what they cannot tell apart is decided by training for longer. Half, since the models
    of one run answer most samples alike, so that they differ by less than independent ones.
    """

    round: int
    """Rounds done when the model was the global one."""
    score: float
    """The best metric so far, higher is better."""
    x: Tensor
    since: int
    """Rounds done when the metric last rose: what ``run.patience`` counts from."""


@dataclass(frozen=True)
class Rival:
    """One of several models side by side (``rounds.search``), with all that belongs to it."""

    x: Tensor
    method: Tensors
    server: Tensors
    clients: dict[int, Tensors]


@dataclass
class State:
    """All that a run is, between two rounds; checkpoint it and nothing is lost."""

    round: int
    x: Tensor
    method: Tensors = field(default_factory=dict)
    """What the method keeps at the server."""
    server: Tensors = field(default_factory=dict)
    """Moments of the server optimizer."""
    rates: dict[str, Any] = field(default_factory=dict)
    """The rate strategy's state; like ``clients``, taken when a checkpoint is due."""
    clients: dict[int, Tensors] = field(default_factory=dict)
    """What clients keep, where the engine holds it."""
    history: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None
    rivals: dict[int, Rival] = field(default_factory=dict)
    """Models that still race, by number; that of the state is the leading one."""


@dataclass
class Problem:
    """The model, the method and who trains it; ``fedtail.runs.build`` and ``fedtail.federate.server`` make one."""

    engine: Engine
    method: Method
    rates: RateStrategy
    n_classes: int
    train_counts: np.ndarray | None = None
    """(C,) global class counts, where they are known (simulation): for head / tail accuracy."""
    auxiliary: Callable[[Tensor], Tensor] | None = None
    """Model vector -> (C, rows, columns) output-layer gradients on the auxiliary set."""
    monitors: Sequence[Monitor] = ()
    """Measurements taken after each round."""
    background: int | None = None
    """The class that means "nothing found", where the data declare one."""
    holdout: Split | None = None
    """The server's hold-out set, where it has one."""
    labels: tuple[str, ...] = ()
    """A label per client that the data names, for strategies that search over clusters of clients."""
    real: bool = False
    """Whether clients are sites, which may be hostile, and not simulated: what ``auto`` settings of the server mean."""
    watched: bool = False
    """Whether each client's influence on the model is recorded."""
    noise_seed: int | None = None
    """Seed of privacy noise; None draws it from the system's entropy, as a real federation must."""
    settled: Mapping[str, float | str] = field(default_factory=dict)
    """Settings that were ``auto`` and were settled before round 0; what a race settles, its strategy knows."""
    search_only: bool = False
    """Whether the run ends when the rate search does, as that of ``fedtail tune``."""
    undone: int = 0
    """Releases under privacy of rounds that a resumed run repeats: what has left has left."""

    @property
    def model(self) -> FlatModel:
        """The model's shape and layers; its weights are scratch space."""
        return self.engine.model

    @property
    def searched(self) -> bool:
        """Whether the run was for the search alone, which is over."""
        return self.search_only and self.rates.done

    def metrics(
        self, confusion: np.ndarray, scores: Scores | None = None, sites: ArrayLike | None = None
    ) -> dict[str, Any]:
        """Everything reported of a confusion matrix, of probabilities where they were counted, and of the macro F1 of
        sites where it is known."""
        return summarize(confusion, self.train_counts, self.background, scores, sites)

    def view(self, settings: Settings, x: Tensor, round: int, weights: np.ndarray, lr: float) -> Server:
        """Return the server's side of a round as the method's hooks see it. weights: (K,) of all registered clients."""

        def auxiliary() -> Tensor:
            if self.auxiliary is None:
                raise FedtailError(f"method {self.method.name!r} needs an auxiliary set; set data.auxiliary to e.g. 20")
            return self.auxiliary(x)

        def compare(models: Sequence[Tensor]) -> np.ndarray:
            from fedtail.rounds.search import values_of  # which needs to know what a problem is

            return values_of(self, settings, models)

        def output_weight(vector: Tensor) -> Tensor:
            offset, shape = self.model.output_layer()
            return vector[offset : offset + shape[0] * shape[1]].view(shape)

        return Server(
            round=round,
            rounds=settings.run.rounds,
            x=x,
            n_clients=self.engine.n_clients,
            n_classes=self.n_classes,
            weights=weights,
            measure=lambda what, other=None: self.engine.measure(x if other is None else other, what),
            auxiliary_gradients=auxiliary,
            output_weight=output_weight,
            classifier=self.model.classifier,
            compare=compare,
            lr=lr,
            seed=settings.run.seed,
        )

    def begin(self) -> State:
        """Round 0 from the model's own initial weights."""
        method = self.method.init_server(self.engine.n_clients, self.n_classes, self.model.n_params)
        return State(0, self.model.vector.clone(), method)

    def capture(self, state: State) -> State:
        """The state with what strategy and clients hold right now: what a checkpoint is made of."""
        state.rates, state.clients = self.rates.state(), self.engine.state()
        return state

    def restore(self, state: State) -> State:
        """Hand a checkpoint's state back to strategy and clients."""
        self.rates.load_state(state.rates)
        self.engine.load_state(state.clients)
        return state


class Engine(Protocol):
    """Runs clients for the round loop. ``clients`` are always returned in ascending order."""

    n_clients: int

    @property
    def model(self) -> FlatModel:
        """The model's shape and layers; its weights are scratch space."""

    sizes: np.ndarray
    """(K,) training samples per client."""
    takes_rivals: bool
    """Whether clients train several models in a round, each with its own start and state (``Task.rival``)."""

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        """Local training of the sampled clients; failures are reported, not raised."""

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """(N, 3, C) pooled per-class counts (correct, true, predicted) of every candidate on private splits."""

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        """(C, C) pooled confusion matrix of a model on ``test`` or ``validation``."""

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        """(C, C) confusion matrix on ``validation`` by client; empty where the engine knows sums over clients only."""

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        """Counts of a model's probabilities: for ``validation`` of each client on its private split, for ``test`` of
        each client that has test samples of its own and, under the number -1, of those that are nobody's own, or of all
        clients where only their sum is known. Answers are by ``decisions``."""

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        """Each client's own decision, found on its private split; nothing of those that keep it to themselves."""

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        """(s, counts of the probabilities of candidate s) pooled over the clients' private splits, in any order."""

    def measure(self, x: Tensor, what: Measurement) -> dict[int, Tensor]:
        """Every client's measurement of a model."""

    def commit(self, choice: dict[int, int]) -> None:
        """Tell clients which probe was kept, so that their state follows it."""

    def state(self) -> dict[int, Tensors]:
        """Client states to checkpoint, where the engine holds them."""

    def load_state(self, state: dict[int, Tensors]) -> None: ...

    def info(self) -> dict[str, Any]:
        """The engine, the path chosen, the device, the threads."""

    def close(self) -> None: ...
