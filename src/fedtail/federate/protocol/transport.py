"""The one small transport under every real federation: hand each client a message, collect the replies.

A transport moves bytes and knows nothing of training. Flower and NVFlare each have an adapter; the one here
keeps the sites in this process, for tests and for trying a deployment's code without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from fedtail.errors import FedtailError
from fedtail.federate.protocol.wire import Parts, error_parts

Replies = dict[int, Parts]
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


def with_phase(phase: str, parts: Mapping[str, bytes]) -> Parts:
    """The message with its phase inside."""
    return {PHASE: phase.encode(), **parts}


def split_phase(parts: Mapping[str, bytes]) -> tuple[str, Parts]:
    """Inverse of ``with_phase``; an empty phase if there is none."""
    rest = dict(parts)
    return rest.pop(PHASE, b"").decode(errors="replace"), rest


class Transport(Protocol):
    """Clients are numbered 0..K-1; which node is which client is the adapter's business."""

    name: str
    n_clients: int

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None) -> tuple[Replies, Errors]:
        """Send every payload to its client and wait for the replies, at most ``timeout`` seconds.

        Each client that was addressed is in exactly one of the results: with its reply, or with one line that
        says why there is none. Nothing is raised for a client's failure.
        """
        ...

    def close(self) -> None: ...


class InProcess:
    """Sites in this process, asked one after another. Messages still go through bytes, as on a wire."""

    name = "in-process"

    def __init__(self, sites: Mapping[int, Callable[[str, Parts], Parts]]) -> None:
        self.sites = dict(sites)
        self.n_clients = len(sites)

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None) -> tuple[Replies, Errors]:
        replies: Replies = {}
        for client, parts in payloads.items():
            try:
                replies[client] = self.sites[client](phase, dict(parts))
            except FedtailError as error:
                replies[client] = error_parts(str(error))
        return replies, {}

    def close(self) -> None:
        self.sites.clear()
