"""The one small transport under every real federation: hand each client a message, collect the replies.

A transport moves bytes and knows nothing of training. Flower and NVFlare each have an adapter; the one here
keeps the sites in this process, for tests and for trying a deployment's code without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol, TypeGuard

from fedtail.errors import FedtailError
from fedtail.federate.protocol.wire import Parts, error_parts

Take = Callable[[int, Parts], None]
"""What a transport hands a client's reply to, as soon as it is there, one at a time."""
Errors = dict[int, str]
PHASE = "phase"
"""The part of a message that says what is asked, where a transport has no other place for it."""


class Phase(StrEnum):
    """What a server can ask of a site; ``Site`` has a method of the same name for each."""

    HELLO = "hello"
    STATISTICS = "statistics"
    TRAIN = "train"
    VALIDATE = "validate"
    CONFUSION = "confusion"
    MEASURE = "measure"
    SCORES = "scores"
    DECIDE = "decide"
    COUNT = "count"
    OFFER = "offer"
    REVEAL = "reveal"
    BEGIN = "begin"
    STEP = "step"


AGREED = (Phase.OFFER, Phase.REVEAL, Phase.BEGIN, Phase.STEP)
"""Of a run that the server does not steer; a site answers them by its own agreements."""


def with_phase(phase: str, parts: Mapping[str, bytes]) -> Parts:
    """The message with its phase inside."""
    return {PHASE: phase.encode(), **parts}


def split_phase(parts: Mapping[str, bytes]) -> tuple[str, Parts]:
    """Inverse of ``with_phase``; an empty phase if there is none."""
    rest = dict(parts)
    return rest.pop(PHASE, b"").decode(errors="replace"), rest


def is_parts(told: object) -> TypeGuard[Parts]:
    """Names and bytes, and nothing that would become bytes: ``bytes`` of a number are as many zeros."""
    return isinstance(told, dict) and all(isinstance(k, str) and isinstance(v, bytes) for k, v in told.items())


class Transport(Protocol):
    """Clients are numbered 0..K-1; which node is which client is the adapter's business."""

    name: str
    n_clients: int

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        """Send every payload to its client and wait for the replies, at most ``timeout`` seconds.

        For each client that was addressed, either ``take`` gets its reply, once and in whatever order replies come, or
        the result says in one line why there is none. A transport keeps no reply that it has handed on. Nothing is
        raised for a client's failure.
        """
        ...

    def close(self) -> None: ...


class InProcess:
    """Sites in this process, asked one after another. Messages still go through bytes, as on a wire."""

    name = "in-process"

    def __init__(self, sites: Mapping[int, Callable[[str, Parts], Parts]]) -> None:
        self.sites = dict(sites)
        self.n_clients = len(sites)

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        for client, parts in payloads.items():
            take(client, self._ask(client, phase, dict(parts)))
        return {}

    def _ask(self, client: int, phase: str, parts: Parts) -> Parts:
        try:
            return self.sites[client](phase, parts)
        except FedtailError as error:
            return error_parts(getattr(error, "code", "site"))

    def close(self) -> None:
        self.sites.clear()
