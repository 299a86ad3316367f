"""FAST-type local selection: every client runs its own bandit over a few rates.

The original paper (Wang et al., 2023) was not available to us; this follows its description: UCB1 over arms,
rewarded by the relative fall of the client's own loss. Clients do not know of each other, the bandit never
stops by itself, and the path variation V_T grows linearly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fedtail.core.random import generator
from fedtail.errors import check_range
from fedtail.rates.base import Present, RateStrategy, Reports, Rewards
from fedtail_experiments.rates.few import few_rates


@dataclass(eq=False)
class FAST(RateStrategy):
    """Per-client UCB1: every arm once in the client's own random order, then argmax mean + sqrt(2 ln t / N).

    The counts are kept here rather than at the clients, so that a run can be saved and resumed: one scalar per
    client and round goes up beyond FedAvg.
    """

    title = "FAST"
    reports = frozenset({"local_gain"})

    n_clients: int
    arms: Sequence[float] = (0.4, 0.5, 0.6, 0.7, 0.8)
    _: KW_ONLY
    discount: float = 1.0
    """Below 1: discounted UCB, which forgets old rewards."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._arms = few_rates("rates.arms", self.arms)
        check_range("rates.discount", self.discount, 0.0, 1.0, open_low=True)
        shape = (self.n_clients, len(self._arms))
        self._plays, self._total = np.zeros(shape), np.zeros(shape)
        self._rates: np.ndarray | None = None
        self._order = np.stack(
            [generator(self.seed, "fast", k).permutation(len(self._arms)) for k in range(self.n_clients)]
        )

    def ask(self) -> np.ndarray:
        return self._arms[[self._next(k) for k in range(self.n_clients)]][:, None]

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        gains = (reports or {}).get("local_gain", np.full((self.n_clients, 1), np.nan))[:, 0]
        heard = np.isfinite(gains)
        if present is not None:
            heard &= np.asarray(present, dtype=bool)
        arms = np.array([self._next(k) for k in range(self.n_clients)])
        self._rates = np.where(heard | (self._rates is None), self._arms[arms], self.rates)
        k = np.flatnonzero(heard)
        self._plays[k] *= self.discount
        self._total[k] *= self.discount
        self._plays[k, arms[k]] += 1.0
        self._total[k, arms[k]] += gains[k]
        return 0

    @property
    def rates(self) -> np.ndarray:
        """The arms played last."""
        return self.ask()[:, 0] if self._rates is None else self._rates.copy()

    @property
    def done(self) -> bool:
        return len(self._arms) == 1

    def stats(self) -> dict[str, Any]:
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(self._plays > 0, self._total / self._plays, -np.inf)
        return {"phase": "search", "best_arm": self._arms[means.argmax(axis=1)].tolist()}

    def state(self) -> dict[str, Any]:
        rates = None if self._rates is None else self._rates.tolist()
        return {"plays": self._plays.tolist(), "total": self._total.tolist(), "rates": rates}

    def load_state(self, state: dict[str, Any]) -> None:
        self._plays, self._total = np.array(state["plays"]), np.array(state["total"])
        self._rates = None if state["rates"] is None else np.array(state["rates"])

    def _next(self, k: int) -> int:
        """Arm of client k in the coming round; depends on nothing but its own rewards."""
        plays = self._plays[k]
        for arm in self._order[k]:
            if plays[arm] == 0:
                return int(arm)
        bound = np.sqrt(2 * math.log(max(plays.sum(), 1.0)) / plays)
        return int(np.argmax(self._total[k] / plays + bound))
