"""Rates as a function of the round: a curriculum from the natural distribution to a balanced one, or back.

The shapes are those of dynamic curriculum learning (Wang et al., ICCV 2019), which resamples by schedule.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fedtail.errors import FedtailError, check_range, one_of
from fedtail.rates.base import Present, RateStrategy, Reports, Rewards, Setting, check_rate

SHAPES = {
    "linear": lambda u: u,
    "cosine": lambda u: (1 - math.cos(math.pi * u)) / 2,
    "convex": lambda u: 1 - math.cos(math.pi * u / 2),
    "concave": lambda u: math.sin(math.pi * u / 2),
    "step": lambda u: float(u >= 0.5),
}


@dataclass(eq=False)
class Schedule(RateStrategy):
    """From ``start`` to ``end`` over ``rounds`` rounds, the same at every client; then ``end``.

    ``shape``: ``linear``, ``cosine`` (slow at both ends), ``convex`` (slow first), ``concave`` (fast first) or
    ``step`` (jump half-way).
    """

    title = "schedule"

    n_clients: int
    start: float = 0.0
    end: float = 0.8
    _: KW_ONLY
    shape: str = "linear"
    rounds: int | None = None
    """None takes the rounds of the run."""

    def __post_init__(self) -> None:
        check_rate("rates.start", self.start)
        check_rate("rates.end", self.end)
        if self.rounds is not None:
            check_range("rates.rounds", self.rounds, 1)
        if self.shape not in SHAPES:
            raise one_of("rates.shape", self.shape, SHAPES)
        self._round = 0
        self._length = self.rounds

    def begin(self, setting: Setting) -> None:
        if self._length is None:
            self._length = setting.rounds

    def rate(self, t: int) -> float:
        """The rate of round t."""
        if self._length is None:
            raise FedtailError("rates 'schedule' needs rates.rounds, the number of rounds from start to end")
        if t >= self._length - 1:
            return self.end
        u = t / (self._length - 1)
        return self.start + (self.end - self.start) * SHAPES[self.shape](u)

    def ask(self) -> np.ndarray:
        return np.full((self.n_clients, 1), self.rate(self._round))

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        self._round += 1
        return 0

    @property
    def rates(self) -> np.ndarray:
        """The rate of the last round; before the first, that of the first."""
        return np.full(self.n_clients, self.rate(max(self._round - 1, 0)))

    @property
    def done(self) -> bool:
        return self._length is not None and self._round >= self._length

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "length": self._length}

    def load_state(self, state: dict[str, Any]) -> None:
        self._round, self._length = state["round"], state["length"]
