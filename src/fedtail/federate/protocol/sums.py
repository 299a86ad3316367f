"""A sum over sites on the wire: what a site adds to it, what comes of it, and what is told of it.

Exchange n of an agreement: every site sends one masked vector and its check value; the relay adds them up in each
group; and what comes out travels to all sites with the question for exchange n + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedtail.federate.protocol.limits import Budget, Kind, WireError
from fedtail.federate.protocol.masks import PRIME, derive, inner, masked, pad, ring, signed, verify
from fedtail.federate.protocol.wire import Parcel

VECTOR, SUM = "masked", "sum/"
"""Names of a site's masked vector, and of the sums of groups."""


def seeds_for(pairs: Mapping[str, bytes], number: int, members: Sequence[str]) -> dict[str, bytes]:
    """The masks that a site shares with each other member of its group, for one exchange."""
    return {peer: derive(secret, "mask", number, *members) for peer, secret in pairs.items() if peer in members}


def check_seed(common: bytes, number: int, members: Sequence[str]) -> bytes:
    """The coefficients and the pad of a group's check value, for one exchange."""
    return derive(common, "check", number, *members)


def hide(
    values: np.ndarray,
    me: str,
    pairs: Mapping[str, bytes],
    common: bytes,
    number: int,
    members: Sequence[str],
    limit: int,
) -> Parcel:
    """A site's (n,) int64 vector as it leaves. members: of its group, sorted."""
    seed = check_seed(common, number, members)
    check = inner(values, seed) + (pad(seed) if me == members[0] else 0)
    hidden, check = masked(values.astype(ring(limit)), check, me, seeds_for(pairs, number, members))
    return Parcel({"number": number, "check": hex(check)}, {VECTOR: as_tensor(hidden)})


def answer_budget(size: int, limit: int) -> Budget:
    return Budget({VECTOR: Kind((_wire_type(limit),), (size,))})


def read_answer(parcel: Parcel, number: int, limit: int) -> tuple[np.ndarray, int]:
    """(vector, check value) of a site's answer to one exchange; ``WireError`` for anything else."""
    if parcel.meta.get("number") != number or VECTOR not in parcel.tensors:
        raise WireError(f"its answer is not to exchange {number}: the sites run other software, or other settings")
    return parcel.tensors[VECTOR].numpy().view(ring(limit)), as_check(parcel.meta.get("check"))


class Sum:
    """The sum of a group's answers, as they come."""

    def __init__(self, size: int, limit: int) -> None:
        self.values, self.check = np.zeros(size, dtype=ring(limit)), 0

    def add(self, values: np.ndarray, check: int) -> None:
        self.values += values
        self.check = (self.check + check) % PRIME


def pack_sums(sums: Sequence[Sum]) -> Parcel:
    tensors = {f"{SUM}{g}": as_tensor(one.values) for g, one in enumerate(sums)}
    return Parcel({"checks": [hex(one.check) for one in sums]}, tensors)


def read_sums(parcel: Parcel, groups: int, size: int, limit: int) -> tuple[np.ndarray, list[int]]:
    """((groups, size) int64, their check values); ``WireError`` for anything else."""
    checks = parcel.meta.get("checks")
    if not isinstance(checks, list) or len(checks) != groups or len(parcel.tensors) != groups:
        raise WireError("the sums that came are of other groups")
    out = np.zeros((groups, size), dtype=np.int64)
    for g, row in enumerate(out):
        values = parcel.tensors.get(f"{SUM}{g}")
        if values is None or tuple(values.shape) != (size,) or values.numpy().itemsize != ring(limit).itemsize:
            raise WireError("a sum that came has another size or type")
        row[:] = signed(values.numpy().view(ring(limit)))
    return out, [as_check(v) for v in checks]


def check_sums(
    found: np.ndarray, checks: Sequence[int], common: bytes, number: int, groups: Sequence[Sequence[str]]
) -> None:
    """``MaskError`` unless each group's sum is that of what its sites have sent."""
    for row, check, members in zip(found, checks, groups, strict=True):
        verify(row, check, check_seed(common, number, members))


def as_check(told: object) -> int:
    try:
        value = int(str(told), 16)
    except ValueError:
        raise WireError("a check value that is no number") from None
    if not 0 <= value < PRIME:
        raise WireError("a check value that is no number below the prime")
    return value


def as_tensor(values: np.ndarray) -> torch.Tensor:
    """Unsigned integers as the signed ones of the same bits, which every reader of tensors knows."""
    return torch.from_numpy(values.view(np.int32 if values.dtype == np.uint32 else np.int64).copy())


def _wire_type(limit: int) -> str:
    return "I32" if ring(limit) == np.uint32 else "I64"
