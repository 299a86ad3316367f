"""One question to several sites: what each said that can be used, and why the others count as missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedtail.federate.protocol.faults import Fault, clean, from_site, log
from fedtail.federate.protocol.limits import ANY, Budget, WireError
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel, Parts, pack, size_of, unpack

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """Every client that was asked is in ``good`` or in ``reasons``, both in ascending order of clients."""

    good: dict[int, T]
    reasons: dict[int, Fault]
    down: int
    """Bytes handed to the transport."""
    up: int
    """Bytes it brought back."""


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
    return Answers(dict(sorted(good.items())), dict(sorted(reasons.items())), down, up)
