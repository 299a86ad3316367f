"""The one random-number policy: every draw comes from a generator keyed by (seed, purpose, client, round).

So results depend neither on the order in which clients run nor on how many run at once, and a run that
is resumed draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, client: int = 0, round: int = 0) -> np.random.Generator:
    """A fresh generator for one purpose of one client in one round."""
    key = (seed, zlib.crc32(purpose.encode()), client, round)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def torch_seed(seed: int, purpose: str, client: int = 0, round: int = 0) -> int:
    """A seed for torch's own generators (model initialisation, dropout), from the same key."""
    return int(generator(seed, purpose, client, round).integers(2**31 - 1))


def step_seeds(n: int, seed: int, purpose: str, client: int = 0, round: int = 0) -> list[int]:
    """One such seed for each of n steps, for what runs side by side with others that draw too."""
    return [int(v) for v in generator(seed, purpose, client, round).integers(2**31 - 1, size=n)]
