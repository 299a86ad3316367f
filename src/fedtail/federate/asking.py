"""Questions to sites: who is asked, what comes back in time, and whether enough of them answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fedtail.core.candidates import Candidates
from fedtail.core.records import Refusal
from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, Kind
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel, pack_candidates
from fedtail.federate.replies import refused
from fedtail.rounds.acceptance import least

CANDIDATES = ("affine", "models")
T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes handed to the transport and got back, and exchanges made; per round, for history and benchmarks."""

    down: int = 0
    up: int = 0
    exchanges: int = 0


@dataclass
class Asking:
    """The sites of a job, reached by messages, and what is known of who answers."""

    transport: Transport
    job: Job
    sizes: np.ndarray
    """(K,) training samples per client, from the handshake."""
    timeout: float | None = 600.0
    """Seconds to wait for the replies of one exchange."""
    quorum: float = 1.0
    """Least share of the asked clients that must answer a validation or measurement."""
    candidates: str = "affine"
    """How FedHOO's candidates travel: ``affine`` (base and one direction per client) or ``models`` (built by the
    server, in an order only it knows)."""
    models_per_message: int = 8
    """With ``models``: candidates sent at a time, which bounds the size of a message."""
    absent: dict[int, str] = field(default_factory=dict)
    """Clients that were not there when the run began, and why; one that joins trains from the next round."""
    gone: set[int] = field(default_factory=set)
    """Clients that have left for good: not asked, and not counted for a quorum."""
    faults: list[Refusal] = field(default_factory=list)
    """Clients that did not answer outside training, since the last ``drain``."""
    traffic: Traffic = field(default_factory=Traffic)
    seen: dict[int, float] = field(default_factory=dict)
    """When each client last answered."""

    round: int = 0
    """That questions are about."""

    def __post_init__(self) -> None:
        if self.candidates not in CANDIDATES:
            raise one_of("deploy.candidates", self.candidates, CANDIDATES)
        self.n_clients = len(self.sizes)

    @property
    def present(self) -> list[int]:
        """Clients that can be asked."""
        return [k for k in range(self.n_clients) if k not in self.absent and k not in self.gone]

    @property
    def members(self) -> int:
        """Clients that count for a quorum."""
        return self.n_clients - len(self.gone)

    def about(self, client: int) -> dict[str, Any]:
        """What every message says."""
        return {"job": self.job.to_json(), "client": client}

    def exchange(
        self,
        phase: Phase,
        parcels: Mapping[int, Parcel],
        read: Callable[[int, Parcel], T],
        budget: Budget,
    ) -> tuple[dict[int, T], list[Refusal]]:
        """What ``read`` makes of the replies, in ascending order of clients, and why the others are missing."""
        answers = exchange(self.transport, phase, parcels, read, self.timeout, budget)
        self.traffic.down += answers.down
        self.traffic.up += answers.up
        self.traffic.exchanges += 1
        self.seen |= dict.fromkeys(answers.good, time.time())
        return answers.good, [refused(k, self.round, reason) for k, reason in answers.reasons.items()]

    def ask(
        self,
        phase: Phase,
        parcels: Mapping[int, Parcel],
        read: Callable[[int, Parcel], T],
        wanted: int,
        kinds: Mapping[str, Kind],
    ) -> dict[int, T]:
        """Replies of a quorum of ``wanted`` clients; who is missing goes into ``faults``.

        ``kinds``: what a reply holds.
        """
        replies, refusals = self.exchange(phase, parcels, read, Budget(kinds))
        self.faults += [replace(r, reason=f"{phase}: {r.reason}") for r in refusals]
        if len(replies) < (needed := least(self.quorum, wanted)):
            first = "; ".join(f"client {r.client}: {r.reason}" for r in refusals[:3]) or "no replies"
            raise FedtailError(
                f"round {self.round}: {len(replies)} of {wanted} clients answered {phase.value!r}, but {needed} are "
                f"needed (run.quorum = {self.quorum:g}; {first})"
            )
        return replies

    def candidate_messages(self, candidates: Candidates) -> Iterator[tuple[np.ndarray, Parcel]]:
        """(which candidates the reply's rows are, message) for one exchange after another."""
        if self.candidates == "affine":
            yield np.arange(len(candidates)), pack_candidates(candidates, {})
            return
        # The system's entropy, not the run's seed: sites know the seed, and the order is what they must not know.
        order = np.random.default_rng().permutation(len(candidates))
        for i in range(0, len(order), self.models_per_message):
            piece = order[i : i + self.models_per_message]
            yield piece, Parcel({}, {"models": torch.stack([candidates.vector(int(s)) for s in piece])})
