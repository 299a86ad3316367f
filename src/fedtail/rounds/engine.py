"""What an engine is: it runs clients, wherever they are, and knows nothing of methods' insides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedtail.core.candidates import Candidates
from fedtail.core.records import Refusal, Task, Tensors, Update
from fedtail.core.resampling import EPOCH_LENGTHS, REPLICATIONS
from fedtail.errors import check_range, one_of
from fedtail.models.flat import FlatModel


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains locally; the same for all clients and rounds."""

    epochs: int = 1
    batch_size: int = 64
    epoch_length: str = "inflated"
    replication: str = "fractional"
    scale: str = "batch"
    """``batch``: g_h = sum/B (the paper's decomposition); ``group``: mean over the group's own samples."""
    seed: int = 0

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("local.epoch_length", self.epoch_length, EPOCH_LENGTHS),
            ("local.replication", self.replication, REPLICATIONS),
            ("local.scale", self.scale, ("batch", "group")),
        ):
            if value not in allowed:
                raise one_of(key, value, allowed)
        check_range("local.epochs", self.epochs, 1)
        check_range("local.batch_size", self.batch_size, 1)


class Engine(Protocol):
    """Runs clients for the round loop. ``clients`` are always returned in ascending order."""

    n_clients: int

    @property
    def model(self) -> FlatModel:
        """The model's shape and layers; its weights are scratch space."""
        ...

    sizes: np.ndarray
    """(K,) training samples per client."""

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        """Local training of the sampled clients; failures are reported, not raised."""
        ...

    def validate(self, candidates: Candidates, clients: Sequence[int]) -> np.ndarray:
        """(N, 3, C) pooled per-class counts (correct, true, predicted) of every candidate on private splits."""
        ...

    def confusion(self, x: Tensor, split: str) -> np.ndarray:
        """(C, C) pooled confusion matrix of a model on ``test`` or ``validation``."""
        ...

    def measure(self, x: Tensor, what: str) -> dict[int, Tensor]:
        """Every client's ``train_loss`` or ``class_loss`` at a model."""
        ...

    def commit(self, choice: dict[int, int]) -> None:
        """Tell clients which probe was kept, so that their state follows it."""
        ...

    def state(self) -> dict[int, Tensors]:
        """Client states to checkpoint, where the engine holds them."""
        ...

    def load_state(self, state: dict[int, Tensors]) -> None: ...

    def info(self) -> dict[str, Any]:
        """What ran where: engine, path chosen, device, threads."""
        ...

    def close(self) -> None: ...
