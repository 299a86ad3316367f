"""The protocol of engines: an engine runs clients, wherever they are, and knows nothing of methods' insides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.decisions import Decision, Decisions, SiteGoal
from fedtail.core.records import Measurement, Refusal, Task, Tensors, Update
from fedtail.core.scores import Scores
from fedtail.models.flat import FlatModel


class Engine(Protocol):
    """Runs clients for the round loop. ``clients`` are always returned in ascending order."""

    n_clients: int

    @property
    def model(self) -> FlatModel:
        """The model's shape and layers; its weights are scratch space."""
        ...

    sizes: np.ndarray
    """(K,) training samples per client."""

    @property
    def takes_rivals(self) -> bool:
        """Whether clients train several models in a round, each with its own start and state (``Task.rival``)."""
        ...

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        """Local training of the sampled clients; failures are reported, not raised."""
        ...

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """(N, 3, C) pooled per-class counts (correct, true, predicted) of every candidate on private splits."""
        ...

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        """(C, C) pooled confusion matrix of a model on ``test`` or ``validation``."""
        ...

    def confusions(self, x: Tensor) -> dict[int, np.ndarray]:
        """The same on ``validation``, client by client; empty where the engine knows sums over clients only."""
        ...

    @property
    def tells_scores(self) -> bool:
        """Whether ``scores`` of validation splits can be had."""
        ...

    def scores(self, x: Tensor, split: str, decisions: Decisions | None = None) -> Iterator[tuple[int, Scores]]:
        """Counts of a model's probabilities: for ``validation`` of each client on its private split, for ``test`` of
        each client that has test samples of its own and, under the number -1, of those that are nobody's own, or of all
        clients where only their sum is known. Answers are by ``decisions``."""
        ...

    def site_decisions(self, x: Tensor, goal: SiteGoal) -> dict[int, Decision]:
        """Each client's own decision, found on its private split; nothing of those that keep it to themselves."""
        ...

    def validate_scores(self, candidates: Candidates, clients: Sequence[int]) -> Iterator[tuple[int, Scores]]:
        """(s, counts of the probabilities of candidate s) pooled over the clients' private splits, in any order."""
        ...

    def measure(self, x: Tensor, what: Measurement) -> dict[int, Tensor]:
        """Every client's measurement of a model."""
        ...

    def commit(self, choice: dict[int, int]) -> None:
        """Tell clients which probe was kept, so that their state follows it."""
        ...

    def state(self) -> dict[int, Tensors]:
        """Client states to checkpoint, where the engine holds them."""
        ...

    def load_state(self, state: dict[int, Tensors]) -> None: ...

    def info(self) -> dict[str, Any]:
        """The engine, the path chosen, the device, the threads."""
        ...

    def close(self) -> None: ...
