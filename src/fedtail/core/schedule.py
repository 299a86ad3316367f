"""Learning rate over rounds: constant inside a round, cosine between rounds."""

from __future__ import annotations

import math

LAST = 1e-4
"""Where ``cosine`` ends."""


def cosine_rate(t: int, rounds: int, start: float, end: float = LAST) -> float:
    """eta_t = end + (start - end)(1 + cos(pi t / (T - 1))) / 2 for t = 0..T-1; ``start`` if T = 1."""
    if rounds <= 1:
        return start
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * t / (rounds - 1)))


def round_rate(kind: str, t: int, rounds: int, start: float, end: float = LAST, warmup: int = 0) -> float:
    """The rate of round ``t`` under a named schedule, ``cosine`` or ``constant``.

    The first ``warmup`` rounds take 1/(warmup+1), 2/(warmup+1), ... of it: a large rate that serves well later can
    blow a fresh network up in its first steps, and plain SGD needs many rounds to come back from there.
    """
    rate = cosine_rate(t, rounds, start, end) if kind == "cosine" else start
    return rate * min(1.0, (t + 1) / (warmup + 1))
