"""The records that cross between the round loop and an engine. They are the wire contract:
what is not in ``Task`` never reaches a client, what is not in ``Update`` never leaves one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Tensors = dict[str, Tensor]
DIVERGED = "diverged"
"""A report: 1 for a local run that met a loss that is not finite. It counts as one that did not move the model, where
without the report the client would be refused."""


@dataclass(frozen=True)
class Measurement:
    """What a method asks of every client's un-resampled training samples, in the simulator alone."""

    name: str
    function: Callable[..., Tensor]
    """Of losses (n,), labels (n,) and the number of classes; or of features (n, d), logits (n, C) and the same two."""
    of_features: bool = False
    """Whether it is of the features before the output layer instead of the losses, unweighted cross-entropy."""


@dataclass(frozen=True)
class Task:
    """One round's work order, the same for every engine.

    ``probes`` holds, per searched quantity, a (S, P) array: what each of the S sampled clients tries in
    each of its P local runs. ``"rate"`` is always there; ``"lr"``, ``"beta"``, ``"mu"`` ... may be.
    """

    round: int
    x: Tensor
    """(n,) the global model: parameters, then float buffers."""
    clients: tuple[int, ...]
    """Sampled clients, ascending; row i of every probe array belongs to ``clients[i]``."""
    probes: Mapping[str, np.ndarray]
    lr: float
    broadcast: Tensors = field(default_factory=dict)
    """The method's message to every client (Ratio Loss weights, SCAFFOLD's control variate ...)."""
    messages: Mapping[int, Tensors] = field(default_factory=dict)
    """The method's message to single clients."""
    weights: np.ndarray | None = None
    """(S,) share of each client in the aggregate, and"""
    axes: np.ndarray | None = None
    """(S,) the axis of a search it moves along: updates of one axis may be added up, by these shares, before they reach
    the server. Both are for engines whose clients do so."""
    reports: frozenset[str] = frozenset()
    """Scalars the rate strategy asks for: ``local_gain`` (FAST), ``local_validation``, ``diverged`` (a race)."""
    rival: int = 0
    """Which of several models side by side this is of (``rounds.search``): what a client keeps is kept for each."""
    advance: Callable[[float], None] = field(default=lambda part: None, compare=False)
    """For engines to call now and then: so much more of the task's local training is done, 1 in all. Stays at home."""

    @property
    def n_probes(self) -> int:
        return int(self.probes["rate"].shape[1])


@dataclass
class Update:
    """EVERYTHING a client uploads after local training; P = number of probes it ran."""

    client: int
    delta: Tensor
    """(P, n) local model minus global model."""
    n_samples: int
    """Original training samples: the aggregation weight p_k comes from it."""
    steps: tuple[int, ...]
    """(P,) local steps taken."""
    loss: tuple[float, ...]
    """(P,) mean training loss over the local run."""
    reports: dict[str, np.ndarray] = field(default_factory=dict)
    """(P,) scalars requested by ``Task.reports``."""
    extras: Tensors = field(default_factory=dict)
    """(P, ...) what the method declares in ``Method.wire`` beyond FedAvg; empty for most."""
    members: tuple[int, ...] = ()
    """The clients, ``client`` the first, of whose updates the server sees no more than this weighted mean. Empty for an
    update of one client."""

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients behind it."""
        return self.members or (self.client,)


def clients_of(updates: Sequence[Update]) -> np.ndarray:
    """(S,) all clients behind some updates, in their order."""
    return np.array([k for u in updates for k in u.clients], dtype=np.int64)


def pooled(weights: np.ndarray, updates: Sequence[Update]) -> np.ndarray:
    """(U,) the weight of each update, from those of all clients behind them."""
    ends = np.cumsum([len(u.clients) for u in updates])
    return np.array([part.sum() if len(part) > 1 else part[0] for part in np.split(weights, ends[:-1])])


@dataclass(frozen=True)
class Refusal:
    """A client whose update is missing or was not accepted, and why."""

    client: int
    round: int
    reason: str
    code: str = ""
    """Where sites are real: one of a few fixed words."""

    def to_json(self) -> dict[str, Any]:
        """For the round's record."""
        return {"client": self.client, "reason": self.reason, **({"code": self.code} if self.code else {})}
