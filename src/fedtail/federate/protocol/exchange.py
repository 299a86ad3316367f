"""One question to several sites: what each said that can be used, and why the others count as missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel, WireError, pack, size_of, unpack

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """Every client that was asked is in ``good`` or in ``reasons``, both in ascending order of clients."""

    good: dict[int, T]
    reasons: dict[int, str]
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
) -> Answers[T]:
    """Send the parcels and have ``read(client, reply)`` make of each reply what it should; a ``WireError``, or a field
    that is missing or of the wrong kind, makes it a reason."""
    payloads = {k: pack(parcel) for k, parcel in parcels.items()}
    replies, errors = transport.exchange(phase, payloads, timeout)
    good: dict[int, T] = {}
    reasons: dict[int, str] = {}
    for client in sorted(parcels):
        if client not in replies:
            reasons[client] = errors.get(client, "no reply")
            continue
        try:
            parcel = unpack(replies[client])
            if "error" in parcel.meta:
                reasons[client] = str(parcel.meta["error"])
            else:
                good[client] = read(client, parcel)
        except WireError as error:
            reasons[client] = str(error)
        except (KeyError, TypeError, ValueError) as error:
            reasons[client] = f"malformed {phase} reply: {type(error).__name__} {error}"
    down, up = (sum(map(size_of, messages.values())) for messages in (payloads, replies))
    return Answers(good, reasons, down, up)
