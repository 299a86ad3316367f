"""A sum that nobody can look into, and that nobody can alter: masks of pairs, and a check value.

Every site sends its integer vector v_k plus one mask for each other site of its group, of which one of the pair adds
and the other takes off the same stream, modulo 2^32 or 2^64. The sum over the whole group is the sum of the vectors;
anything less is random. Beside it each site sends, masked alike modulo the prime p = 2^61 - 1, the inner product of its
vector with coefficients c that only sites know; the first site of the group adds a secret pad d. The sum V is taken if
its check value is <c, V> + d. Without the pad, twice the sum would fit twice the check value.

Streams are AES-256 in counter mode; keys are derived by BLAKE2b from secrets of the run, the number of the exchange and
the group, and serve once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedtail.core.privacy import secure_normal
from fedtail.federate.protocol.limits import Budget, Kind, WireError
from fedtail.federate.protocol.wire import Parcel

SEED = 32
"""Bytes of a secret."""
PRIME = (1 << 61) - 1
LIMB, LIMBS, BLOCK = 21, 3, 1024
"""Coefficients are multiplied in three pieces of 21 bits, by halves of 32 bits of the values: 1,024 of these products
fit into 64 bits."""


class MaskError(ValueError):
    """A sum that is not the sum of what was sent, or values that cannot be summed."""


def derive(secret: bytes, *labels: str | int | bytes) -> bytes:
    """A secret for one purpose. Labels are framed by their lengths, so that no two lists of them look alike."""
    out = hashlib.blake2b(key=secret, digest_size=SEED)
    for label in labels:
        data = label if isinstance(label, bytes) else str(label).encode()
        out.update(len(data).to_bytes(8, "big") + data)
    return out.digest()


def stream(seed: bytes, size: int, dtype: Any) -> np.ndarray:
    """(size,) uniformly random unsigned integers."""
    kind = np.dtype(dtype).newbyteorder("<")
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(size * kind.itemsize)), dtype=kind)


def ring(limit: int) -> np.dtype[Any]:
    """The smallest ring in which totals below a limit can be told apart."""
    return np.dtype(np.uint32 if limit <= 1 << 31 else np.uint64)


def masked(values: np.ndarray, check: int, me: str, seeds: Mapping[str, bytes]) -> tuple[np.ndarray, int]:
    """(n,) unsigned values, in place, and their check value with the masks of all pairs, of which the first by name
    adds."""
    for peer, seed in seeds.items():
        mask = stream(derive(seed, "values"), len(values), values.dtype)
        extra = int.from_bytes(derive(seed, "check"), "big")
        if me < peer:
            values += mask
            check += extra
        else:
            values -= mask
            check -= extra
    return values, check % PRIME


def inner(values: np.ndarray, seed: bytes) -> int:
    """<c, values> modulo the prime for the coefficients of a seed. values: (n,) int64."""
    coefficients = stream(seed, len(values), np.uint64) >> np.uint64(3)
    halves = (values & 0xFFFFFFFF, values >> 32)
    wide = int(values.max(initial=0)) >> 31 or -int(values.min(initial=0)) >> 31
    out = 0
    for i in range(LIMBS):
        limb = ((coefficients >> np.uint64(LIMB * i)) & np.uint64((1 << LIMB) - 1)).astype(np.int64)
        for half, shift in zip(halves if wide else (values,), (0, 32), strict=False):
            out += _dot(limb, half) << (LIMB * i + shift)
    return out % PRIME


def _dot(limb: np.ndarray, values: np.ndarray) -> int:
    """The inner product as an integer of any size."""
    whole = len(values) - len(values) % BLOCK
    blocks = np.einsum("ij,ij->i", limb[:whole].reshape(-1, BLOCK), values[:whole].reshape(-1, BLOCK))
    return sum(blocks.tolist()) + int(limb[whole:] @ values[whole:])


def pad(seed: bytes) -> int:
    """The secret that the first site of a group adds to the check value."""
    return int.from_bytes(derive(seed, "pad"), "big") % PRIME


def signed(total: np.ndarray) -> np.ndarray:
    """(n,) int64 of a sum in a ring."""
    return total.view(np.int32 if total.dtype == np.uint32 else np.int64).astype(np.int64)


def verify(total: np.ndarray, check: int, seed: bytes) -> None:
    """``MaskError`` unless a group's sum, (n,) int64, fits its check value. Numbers that differ by a multiple of the
    prime would have the same one, so that none may be half as large."""
    large = max(int(total.max(initial=0)), -int(total.min(initial=0))) >= PRIME // 2
    if large or (inner(total, seed) + pad(seed)) % PRIME != check:
        raise MaskError("the sum that came back is not the sum of what the sites sent")


@dataclass(frozen=True)
class Fixed:
    """Fixed point for vectors whose sum stays within +-``limit`` in every coordinate."""

    limit: float
    bits: int = 30
    """Of the largest value, without its sign; a sum has room for twice that."""

    @property
    def scale(self) -> float:
        """Units of 1: a power of two, so that scaling itself rounds nothing."""
        return 2.0 ** math.floor(self.bits - math.log2(self.limit))

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n,) int64; what is beyond the limit is cut. values: (n,) finite."""
        if not np.isfinite(values).all():
            raise MaskError("values are not finite")
        return np.rint(np.clip(values, -self.limit, self.limit) * self.scale).astype(np.int64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """(n,) float64."""
        return np.asarray(total / self.scale)


FINE, COARSE = 1.5, float(1 << 49)
"""Deviations of a share of noise, in units: below, rounding would take it away (the sum of rounded shares is as private
as it says but for 10 exp(-pi^2 1.5^2) < 1e-8); above, floating point has no numbers for its last bits, and 64 bits no
room."""


def share_of_noise(n: int, deviation: float | np.ndarray, secret: bytes, purpose: str) -> np.ndarray:
    """(n,) int64: Gaussian noise of a ``deviation`` in units, one or (n,), rounded, from a cryptographic stream.

    Given its rounding error, a rounded Gaussian is exactly a discrete one on a shifted grid. Sums of those are as
    private as one Gaussian of the summed variance up to a term of exp(-pi^2 deviation^2) (Kairouz, Liu and Steinke,
    ICML 2021), so that no share is finer than ``FINE``.
    """
    return np.rint(secure_normal(secret, purpose, n) * np.maximum(deviation, FINE)).astype(np.int64)


# -- exchange n: every site sends a masked vector and its check value; the sum goes to all with question n + 1 --

VECTOR, SUM = "masked", "sum/"
"""Names of a site's vector, and of the sums of groups."""


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
    """A site's (n,) int64 vector as it leaves, under a mask for each other member. members: of its group, sorted."""
    seed = check_seed(common, number, members)
    check = inner(values, seed) + (pad(seed) if me == members[0] else 0)
    masks = {peer: derive(pairs[peer], "mask", number, *members) for peer in members if peer != me}
    hidden, check = masked(values.astype(ring(limit)), check, me, masks)
    return Parcel({"number": number, "check": hex(check)}, {VECTOR: as_tensor(hidden)})


def bare(values: np.ndarray, number: int, limit: int) -> Parcel:
    """The same for a server that sites trust: no masks, and nothing to check."""
    return Parcel({"number": number, "check": "0x0"}, {VECTOR: as_tensor(values.astype(ring(limit)))})


def answer_budget(size: int, limit: int) -> Budget:
    return Budget({VECTOR: Kind(("I32" if ring(limit).itemsize == 4 else "I64",), (size,))})


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
        value = -1
    if not 0 <= value < PRIME:
        raise WireError("a check value that is no number below the prime")
    return value


def as_tensor(values: np.ndarray) -> torch.Tensor:
    """Unsigned integers as the signed ones of the same bits, which every reader of tensors knows."""
    return torch.from_numpy(values.view(np.int32 if values.dtype == np.uint32 else np.int64))
