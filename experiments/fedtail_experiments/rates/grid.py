"""Grid: find the one uniform rate "U" of the paper's tables on validation data, inside a run.

Every client trains at every rate of the grid; since aggregation is linear, candidate j is the model in which
all clients took rate j. After a few rounds the rate with the best mean advantage is kept for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fedtail.errors import FedtailError, check_range
from fedtail.rates.base import Present, RateStrategy, Reports, Rewards
from fedtail_experiments.rates.few import few_rates


@dataclass(eq=False)
class Grid(RateStrategy):
    """``cold_rounds`` at the middle rate, then ``rounds`` rounds with all rates at once, then the best.

    Rewards are counted from their round's mean, since accuracy rises over rounds. Ties go to the lowest rate.
    Works with partial participation; a search round costs as many local runs as the grid has rates.
    """

    title = "grid"

    n_clients: int
    grid: Sequence[float] = (0.4, 0.5, 0.6, 0.7, 0.8)
    _: KW_ONLY
    rounds: int = 5
    cold_rounds: int = 3

    def __post_init__(self) -> None:
        check_range("rates.rounds", self.rounds, 1)
        check_range("rates.cold_rounds", self.cold_rounds, 0)
        self._grid = few_rates("rates.grid", self.grid)
        self._round = 0
        self._advantage = np.zeros(len(self._grid))
        self._choice = 0
        self._current = len(self._grid) // 2

    def ask(self) -> np.ndarray:
        rates = self._grid if self.patterns() else self._grid[[self._current]]
        return np.tile(rates, (self.n_clients, 1))

    def patterns(self) -> str | None:
        return None if self.done or self._round < self.cold_rounds else "uniform"

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        if self.patterns() is None:
            self._choice = 0
            self._round += 1
            return 0
        r = np.asarray([] if rewards is None else rewards, dtype=np.float64)
        if r.shape != self._grid.shape or not np.isfinite(r).all():
            raise FedtailError(f"Grid needs {len(self._grid)} finite rewards, got {r.tolist()}")
        self._advantage += r - r.mean()
        self._round += 1
        self._choice = self._current = int(self._advantage.argmax())
        return self._choice

    @property
    def choice(self) -> np.ndarray:
        return np.full(self.n_clients, self._choice)

    @property
    def rates(self) -> np.ndarray:
        return np.full(self.n_clients, self._grid[self._current])

    @property
    def done(self) -> bool:
        return self._round >= self.cold_rounds + self.rounds

    def stats(self) -> dict[str, Any]:
        tried = max(self._round - self.cold_rounds, 0)
        return {
            "phase": "fixed" if self.done else "search" if self.patterns() else "cold",
            "rounds": min(self._round, self.cold_rounds + self.rounds),
            "advantage": (self._advantage / max(min(tried, self.rounds), 1)).tolist(),
        }

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "advantage": self._advantage.tolist(), "current": self._current}

    def load_state(self, state: dict[str, Any]) -> None:
        self._round, self._advantage = state["round"], np.array(state["advantage"])
        self._current = state["current"]
