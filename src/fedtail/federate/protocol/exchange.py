"""One question to several sites: what each said that can be used, and why the others count as missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedtail.federate.protocol.faults import from_site
from fedtail.federate.protocol.transport import Phase, Transport
from fedtail.federate.protocol.wire import Parcel, Parts, WireError, pack, size_of, unpack

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
    most: float = float("inf"),
) -> Answers[T]:
    """Send the parcels and have ``read(client, reply)`` make of each reply what it should, as soon as it is there.

    A ``WireError``, or a field that is missing or of the wrong kind, makes it a reason; so do more than ``most`` bytes,
    before they are looked at.
    """
    packed: dict[int, bytes] = {}
    payloads = {k: pack(parcel, packed) for k, parcel in parcels.items()}
    good: dict[int, T] = {}
    reasons: dict[int, str] = {}
    up = 0

    def take(client: int, parts: Parts) -> None:
        nonlocal up
        size = size_of(parts)
        up += size
        if size > most:
            reasons[client] = f"a reply of {size / 1e6:.1f} MB, at most {most / 1e6:.1f} MB are possible"
            return
        try:
            parcel = unpack(parts)
            if "error" in parcel.meta:
                reasons[client] = str(from_site(client, parcel.meta["error"]))
            else:
                good[client] = read(client, parcel)
        except WireError as error:
            reasons[client] = str(error)
        except (KeyError, TypeError, ValueError) as error:
            reasons[client] = f"malformed {phase} reply: {type(error).__name__} {error}"

    errors = transport.exchange(phase, payloads, timeout, take)
    for client in parcels:
        if client not in good:
            reasons.setdefault(client, errors.get(client, "no reply"))
    down = sum(map(size_of, payloads.values()))
    return Answers(dict(sorted(good.items())), dict(sorted(reasons.items())), down, up)
