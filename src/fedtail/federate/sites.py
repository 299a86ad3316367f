"""The sites of a job, as a trusted server reaches them: who is asked, what comes back in time, who is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedtail.core.records import Refusal
from fedtail.errors import FedtailError
from fedtail.federate.protocol.exchange import exchange
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, Kind
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel
from fedtail.federate.replies import refused
from fedtail.rounds.acceptance import least

T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes handed to the transport and got back, and exchanges made; per round, for history and benchmarks."""

    down: int = 0
    up: int = 0
    exchanges: int = 0


@dataclass
class Sites:
    """The sites of a job, and what is known of who answers."""

    transport: Transport
    job: Job
    sizes: np.ndarray
    """(K,) training samples per client, from the handshake."""
    timeout: float | None = 600.0
    """Seconds to wait for the replies of one exchange."""
    quorum: float = 1.0
    """Least share of the asked clients that must answer a validation or measurement."""
    faults: list[Refusal] = field(default_factory=list)
    """Clients that did not answer outside training, since the last ``drain``."""
    traffic: Traffic = field(default_factory=Traffic)
    round: int = 0
    """The round that questions are about."""

    @property
    def clients(self) -> range:
        """All of them."""
        return range(len(self.sizes))

    def about(self, client: int) -> dict[str, Any]:
        """What every message says."""
        return {"job": self.job.to_json(), "client": client}

    def exchange(
        self, phase: Phase, parcels: Mapping[int, Parcel], read: Callable[[int, Parcel], T], budget: Budget
    ) -> tuple[dict[int, T], list[Refusal]]:
        """What ``read`` makes of the replies, in ascending order of clients, and why the others are missing."""
        answers = exchange(self.transport, phase, parcels, read, self.timeout, budget)
        self.traffic.down += answers.down
        self.traffic.up += answers.up
        self.traffic.exchanges += 1
        return answers.good, [refused(k, self.round, reason) for k, reason in answers.reasons.items()]

    def ask(
        self,
        phase: Phase,
        parcels: Mapping[int, Parcel],
        read: Callable[[int, Parcel], T],
        kinds: Mapping[str, Kind],
        wanted: int | None = None,
    ) -> dict[int, T]:
        """Replies of a quorum of ``wanted`` clients, by default of all; who is missing goes into ``faults``.

        ``kinds``: what a reply holds.
        """
        replies, refusals = self.exchange(phase, parcels, read, Budget(kinds))
        wanted = len(self.sizes) if wanted is None else wanted
        self.faults += [replace(r, reason=f"{phase}: {r.reason}") for r in refusals]
        if len(replies) < (needed := least(self.quorum, wanted)):
            first = "; ".join(f"client {r.client}: {r.reason}" for r in refusals[:3]) or "no replies"
            raise FedtailError(
                f"round {self.round}: {len(replies)} of {wanted} clients answered {phase.value!r}, but {needed} are "
                f"needed (run.quorum = {self.quorum:g}; {first})"
            )
        return replies

    def drain(self) -> list[Refusal]:
        """Faults since the last call, for the round's history."""
        out, self.faults = self.faults, []
        return out
