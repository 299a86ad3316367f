"""The one small transport under every real federation: hand each client a message, collect the replies.

A transport moves bytes and knows nothing of training. Flower and NVFlare each have an adapter; the one here
keeps the sites in this process, for tests and for trying a deployment's code without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeGuard, TypeVar

from fedtail.federate.protocol.faults import Fault, clean, from_site, log
from fedtail.federate.protocol.limits import ANY, Budget, WireError
from fedtail.federate.protocol.wire import Parcel, Parts, pack, size_of, unpack

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
    SCORES = "scores"
    DECIDE = "decide"
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

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        """Send every payload to its client and wait for the replies, at most ``timeout`` seconds.

        For each client that was addressed, either ``take`` gets its reply, once and in whatever order replies come, or
        the result says in one line why there is none. A transport keeps no reply that it has handed on. Nothing is
        raised for a client's failure.
        """
        ...


class InProcess:
    """Sites in this process, asked one after another. Messages still go through bytes, as on a wire."""

    name = "in-process"

    def __init__(self, sites: Mapping[int, Callable[[str, Parts], Parts]]) -> None:
        self.sites = dict(sites)

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        for client, parts in payloads.items():
            take(client, self._ask(client, phase, dict(parts)))
        return {}

    def _ask(self, client: int, phase: str, parts: Parts) -> Parts:
        return self.sites[client](phase, parts)


T = TypeVar("T")


@dataclass(frozen=True)
class Traffic:
    """Bytes handed to the transport and got back, and exchanges made; per round, for history and benchmarks."""

    down: int = 0
    up: int = 0
    exchanges: int = 0

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(self.down + more.down, self.up + more.up, self.exchanges + more.exchanges)


@dataclass(frozen=True)
class Answers(Generic[T]):
    """Every client that was asked is in ``good`` or in ``reasons``, both in ascending order of clients."""

    good: dict[int, T]
    reasons: dict[int, Fault]
    traffic: Traffic


def exchange(
    transport: Transport,
    phase: Phase,
    parcels: Mapping[int, Parcel],
    read: Callable[[int, Parcel], T],
    timeout: float | None,
    budget: Budget = ANY,
) -> Answers[T]:
    """Send the parcels and have ``read(client, reply)`` make of each reply what it should, as soon as it is there.

    A reply that its ``budget`` does not declare, or that ``read`` cannot use, is a reason why this client is missing,
    and nothing else: whatever one site sends, the others' round goes on.
    """
    packed: dict[int, bytes] = {}
    payloads = {k: pack(parcel, packed) for k, parcel in parcels.items()}
    good: dict[int, T] = {}
    reasons: dict[int, Fault] = {}
    up = 0

    def take(client: int, parts: Parts) -> None:
        nonlocal up
        up += size_of(parts)
        try:
            parcel = unpack(parts, budget)
            if "error" in parcel.meta:
                reasons[client] = from_site(client, parcel.meta["error"])
            else:
                good[client] = read(client, parcel)
        except WireError as error:
            reasons[client] = Fault(error.code, clean(error))
        except Exception as error:
            log.warning("client %d, %s: %s: %s", client, phase, type(error).__name__, clean(error))
            reasons[client] = Fault("malformed", f"malformed {phase} reply ({type(error).__name__})")

    errors = transport.exchange(phase, payloads, timeout, take)
    for client in parcels:
        if client not in good:
            said = errors.get(client)
            reasons.setdefault(client, Fault("late", "no reply") if said is None else Fault("transport", clean(said)))
    down = sum(map(size_of, payloads.values()))
    return Answers(dict(sorted(good.items())), dict(sorted(reasons.items())), Traffic(down, up, 1))
