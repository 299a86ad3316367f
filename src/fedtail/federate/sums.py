"""The server's side of masked sums: who is added up, and what comes out. It sees sums, and nothing of single sites."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtail.core.masks import CHECKS, MaskError, without_checks
from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import log
from fedtail.federate.protocol.handshake import Hello
from fedtail.federate.protocol.policy import REVEALS
from fedtail.federate.protocol.sums import LEAST, Order, as_masked, named_counts, size_of_counts
from fedtail.federate.protocol.wire import Parcel
from fedtail.settings import Settings


@dataclass
class Sums:
    """What the server knows of the sites that can be added up, by client."""

    names: Sequence[str]
    adverts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Client -> its signed key for the run; checked by the sites, not here."""
    strict: bool = True
    """Some site refuses sums whose differences would tell of single sites."""
    last: tuple[int, ...] = ()
    """Clients of the last sum of counts."""
    number: int = 0

    @classmethod
    def of(cls, hellos: Mapping[int, Hello], names: Sequence[str]) -> Sums:
        out = cls(names)
        out.learn(hellos)
        out.strict = any(h.masks.get("differences") != "allow" for h in hellos.values())
        return out

    def learn(self, hellos: Mapping[int, Hello]) -> None:
        """Keys of sites that have said hello to the job."""
        for k, hello in hellos.items():
            if "key" in hello.masks:
                self.adverts[k] = {name: str(hello.masks[name]) for name in ("key", "signature")}

    def members(self, clients: Sequence[int]) -> list[int]:
        """Who is asked for counts. Where differences count, whoever came late stays out: the others' sum is known."""
        if self.strict and self.last and set(self.last) <= set(clients):
            return list(self.last)
        return list(clients)

    def order(self, clients: Sequence[int], **more: Any) -> Order:
        """A new sum over these clients; ``FedtailError`` if they are too few."""
        if len(clients) < LEAST:
            raise FedtailError(f"a masked sum needs at least {LEAST} sites, {len(clients)} are there")
        self.number = max(self.number + 1, time.time_ns())  # rises over restarts too
        found = {self.names[k]: self.adverts.get(k, {"key": "", "signature": ""}) for k in clients}
        return Order(number=self.number, members=tuple(sorted(found)), adverts=found, **more)


def read_masked_counts(client: int, parcel: Parcel, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """(n,) of a reply, as random as they come; ``ValueError`` if they are something else."""
    return as_masked(parcel.tensors, size_of_counts(shapes) + CHECKS, np.uint64)


def sum_of_counts(replies: Mapping[int, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Counts by name, added over all members; ``FedtailError`` where the masks do not cancel."""
    total = np.zeros(size_of_counts(shapes) + CHECKS, dtype=np.uint64)
    for values in replies.values():
        total += values
    try:
        counts = without_checks(total)
    except MaskError as error:
        raise FedtailError(f"a masked sum over {len(replies)} sites is refused: {error}") from None
    if counts.size and int(counts.max()) >> 62:
        raise FedtailError("a masked sum has counts that cannot be; a site sent something else than counts")
    return named_counts(counts, shapes)


def choose_reveal(settings: Settings, hellos: Mapping[int, Hello], names: Sequence[str], n: int) -> tuple[str, str]:
    """What the ``n`` sites of a run shall reveal, and one line where ``auto`` means less than sums."""
    wanted = settings.deploy.reveal
    if wanted in ("totals", "classes"):
        return wanted, ""
    why = _no_sums(settings, hellos, names, n)
    if not why:
        return "sums", ""
    if wanted == "sums":
        raise FedtailError(f"deploy.reveal = 'sums' is not possible: {why}")
    said = f"validation tells totals only, nothing per class: {why} (deploy.reveal)"
    log.warning(said)
    return "totals", said


def _no_sums(settings: Settings, hellos: Mapping[int, Hello], names: Sequence[str], n: int) -> str:
    """Why class counts cannot be added up under masks; empty if they can."""
    if n < LEAST:
        return f"masked sums need at least {LEAST} sites, there are {n}"
    for k, hello in sorted(hellos.items()):
        if not hello.masks:
            return f"{names[k]} has no list of sites (sites.pub) for masked sums"
        if REVEALS.index(str(hello.masks.get("reveal", "totals"))) < REVEALS.index("sums"):
            return f"the policy of {names[k]} allows no sums"
        if int(hello.masks.get("least", LEAST)) > n:
            return f"{names[k]} wants sums over at least {int(hello.masks['least'])} sites, there are {n}"
    first = min(hellos)
    other = [names[k] for k, h in sorted(hellos.items()) if h.masks.get("roster") != hellos[first].masks.get("roster")]
    if other:
        return f"{other[0]} has another list of sites (sites.pub) than {names[first]}"
    strict = [names[k] for k, h in sorted(hellos.items()) if h.masks.get("differences") != "allow"]
    if strict and settings.deploy.reveal == "auto" and min(settings.run.quorum, settings.run.participation) < 1:
        return (
            f"run.quorum or run.participation below 1 lets sites be missing, and the policy of {strict[0]} refuses "
            "sums whose differences would tell of single sites"
        )
    return ""
