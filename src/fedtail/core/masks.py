"""Masks that hide each site's numbers and cancel in the sum of all.

Every pair of sites shares a secret. From it both draw the same stream of random integers, which one adds to its
numbers and the other takes off, modulo 2^32 or 2^64 (Bonawitz et al., CCS 2017). What a site sends is uniformly random
to whoever lacks one of its secrets; the sum over all members is exact, since integers modulo a power of two are.

- Counts are integers as they are; real vectors become fixed point, see ``Fixed``.
- Two check values travel under the masks, so that a sum whose masks do not cancel is noticed, never taken for a sum.
- ``Release``: a site that may vanish between its message and the sum also adds a mask of its own; the secrets that take
  masks off again leave sites all together or not at all, for one set of survivors.
- ``isolated``: which sites a combination of several sums would tell of. Masks hide single messages; the difference of a
  sum over all and a sum over all but one does not care.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from fedtail.core.privacy import secure_normal

SEED = 32
"""Bytes of a secret."""
CHECKS = 2
"""Values that a vector has more under masks."""
HEADROOM = 30
"""Bits of a sum's largest value in fixed point; modulo 2^32 that leaves a factor of two."""


class MaskError(ValueError):
    """Masks that do not cancel, or secrets that do not fit: there is no sum, rather than a wrong one."""


def derive(secret: bytes, *labels: str | int | bytes) -> bytes:
    """A secret for one purpose. Labels are framed by their lengths: no two lists of them look alike."""
    out = hashlib.blake2b(key=secret, digest_size=SEED)
    for label in labels:
        data = label if isinstance(label, bytes) else str(label).encode()
        out.update(len(data).to_bytes(8, "big") + data)
    return out.digest()


def digest(members: Iterable[str]) -> bytes:
    """One name for a set of sites."""
    return derive(bytes(SEED), "members", *sorted(members))


def stream(seed: bytes, size: int, dtype: Any) -> np.ndarray:
    """(size,) uniformly random unsigned integers: SHAKE-128 of the seed."""
    kind = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(hashlib.shake_128(seed).digest(size * kind.itemsize), dtype=kind)


def pair_seeds(me: str, secrets: Mapping[str, bytes], members: Collection[str], context: bytes) -> dict[str, bytes]:
    """The seed that ``me`` shares with every other member, for one sum over exactly these members. ``context``: of that
    sum alone; two members with different ones share no mask that cancels."""
    whole = digest(members)
    return {peer: derive(secrets[peer], "mask", context, whole) for peer in members if peer != me}


def add_pair_masks(values: np.ndarray, me: str, seeds: Mapping[str, bytes]) -> np.ndarray:
    """values: (n,) unsigned, with the masks of all pairs: of each pair, the first by name adds and the other takes
    off."""
    out = values.copy()
    for peer, seed in seeds.items():
        mask = stream(seed, len(values), values.dtype)
        if me < peer:
            out += mask
        else:
            out -= mask
    return out


def with_checks(values: np.ndarray) -> np.ndarray:
    """(n + 2,): the values, their sum, and their sum with odd factors; both add up as the values do."""
    return np.concatenate([values, _checks(values)])


def without_checks(total: np.ndarray) -> np.ndarray:
    """(n,) of a sum of vectors ``with_checks``; ``MaskError`` if a mask was left, or a message altered."""
    values = total[:-CHECKS]
    if not np.array_equal(_checks(values), total[-CHECKS:]):
        raise MaskError("the masks do not cancel: a message was altered, or belongs to another sum")
    return values


def _checks(values: np.ndarray) -> np.ndarray:
    odd = 2 * np.arange(len(values), dtype=values.dtype) + 1
    return np.array([values.sum(dtype=values.dtype), (values * odd).sum(dtype=values.dtype)], dtype=values.dtype)


# -- real vectors --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """Fixed point modulo 2^32 for vectors whose sum stays within +-``limit`` in every coordinate."""

    limit: float

    @property
    def scale(self) -> float:
        """Units of 1: a power of two, so that scaling itself rounds nothing."""
        return 2.0 ** math.floor(HEADROOM - math.log2(self.limit))

    def error(self, n: int) -> float:
        """How far the sum of ``n`` rounded vectors can be from the sum of the vectors, in a coordinate."""
        return 0.5 * n / self.scale

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n,) unsigned; what is beyond the limit is cut. values: (n,) finite."""
        if not np.isfinite(values).all():
            raise MaskError("values are not finite")
        return np.rint(np.clip(values, -self.limit, self.limit) * self.scale).astype(np.int64).astype(np.uint32)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """(n,) float64."""
        return np.asarray(total.astype(np.uint32).view(np.int32) / self.scale)


# -- survivors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """What one survivor hands out so that the sum over all survivors can be unmasked.

    ``sealed`` are its secrets (its own mask's seed, and those it shares with members that vanished), under a key made
    of one piece from every other survivor; ``pieces`` are its own pieces for the others. Pieces depend on the set of
    survivors: who tells two sites of two sets opens neither's secrets.
    """

    sealed: bytes
    pieces: dict[str, bytes]

    @classmethod
    def of(
        cls,
        me: str,
        own: bytes,
        secrets: Mapping[str, bytes],
        seeds: Mapping[str, bytes],
        left: Collection[str],
        context: bytes,
    ) -> Release:
        """own: seed of the own mask; secrets: shared with each peer; seeds: of the pair masks, for all members of the
        sum; left: the survivors; context: the sum's."""
        whole = digest(left)
        others = sorted(set(left) - {me})
        mine = [derive(secrets[peer], "piece", context, whole, me) for peer in others]
        inside = own + b"".join(seeds[peer] for peer in sorted(set(seeds) - set(left)))
        pieces = {peer: derive(secrets[peer], "piece", context, whole, peer) for peer in others}
        return cls(_sealed(inside, mine), pieces)


def open_releases(
    releases: Mapping[str, Release], members: Collection[str]
) -> dict[str, tuple[bytes, dict[str, bytes]]]:
    """survivor -> (seed of its own mask, seeds it shares with those of ``members`` that vanished). ``releases``: of all
    survivors; without one of them, or with one for another set, what comes out is random."""
    vanished = sorted(set(members) - set(releases))
    out = {}
    for me, release in releases.items():
        mine = [releases[peer].pieces.get(me, b"") for peer in sorted(set(releases) - {me})]
        inside = _sealed(release.sealed, mine)
        if len(inside) != SEED * (1 + len(vanished)) or any(len(piece) != SEED for piece in mine):
            raise MaskError(f"the secrets of {me!r} do not match the members that dropped out")
        parts = [inside[i : i + SEED] for i in range(0, len(inside), SEED)]
        out[me] = parts[0], dict(zip(vanished, parts[1:], strict=True))
    return out


def _sealed(data: bytes, pieces: Sequence[bytes]) -> bytes:
    """The data with the stream of all pieces added bit by bit; the same again takes it off."""
    key = hashlib.shake_128(derive(bytes(SEED), "seal", *pieces)).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, key, strict=True))


def unmasked(total: np.ndarray, opened: Mapping[str, tuple[bytes, Mapping[str, bytes]]]) -> np.ndarray:
    """The survivors' added messages without their own masks and without those shared with members that vanished."""
    out = total.copy()
    for me, (own, shared) in opened.items():
        out -= stream(own, len(out), out.dtype)
        out = -add_pair_masks(-out, me, shared)
    return out


# -- what several sums tell ------------------------------------------------------------------------------------


def isolated(sets: Iterable[Collection[str]], least: int) -> tuple[str, ...]:
    """Sites, fewer than ``least``, that some combination of sums over these sets depends on alone; empty if none.

    Sums are rows of 0 and 1 over sites. A combination that is zero everywhere but on a group of sites exists if and
    only if the rows have a smaller rank without that group's columns.
    """
    rows = [frozenset(s) for s in sets]
    names = sorted(frozenset().union(*rows))
    if least < 2 or not rows:
        return ()
    table = np.array([[name in row for name in names] for row in rows], dtype=np.float64)
    rank = int(np.linalg.matrix_rank(table))
    for size in range(1, min(least, len(names) + 1)):
        for group in combinations(range(len(names)), size):
            if np.linalg.matrix_rank(np.delete(table, group, axis=1)) < rank:
                return tuple(names[i] for i in group)
    return ()


# -- noise -----------------------------------------------------------------------------------------------------


def share_of_noise(n: int, deviation: float, secret: bytes, purpose: str) -> np.ndarray:
    """(n,) int64: Gaussian noise of a ``deviation`` in units, rounded, from a cryptographic stream.

    Given its rounding error, a rounded Gaussian is exactly a discrete one on a shifted grid. Sums of those are as
    private as one Gaussian of the summed variance up to a term of exp(-2 pi^2 deviation^2) (Kairouz, Liu and Steinke,
    ICML 2021), which is nothing at the thousands of units that noise has here.
    """
    return np.rint(secure_normal(secret, purpose, n) * deviation).astype(np.int64)
