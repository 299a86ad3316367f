"""Locally optimal rates: each client tries every arm once and keeps what its own validation split likes best.

The natural alternative to a joint search (paper E.1): cheap to explain, blind to how clients' updates mix.
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
class LocallyOptimal(RateStrategy):
    """``cold_rounds`` at the middle arm, then one round with all arms, then each client's own best.

    A client that is absent from the round of trials tries its arms the next time it is there; one that is there but
    has no validation samples keeps the middle arm. The round of trials costs as many local runs as there are arms;
    ties go to the lowest rate.
    """

    title = "locally optimal"
    reports = frozenset({"local_validation"})

    n_clients: int
    arms: Sequence[float] = (0.4, 0.5, 0.6, 0.7, 0.8)
    _: KW_ONLY
    cold_rounds: int = 3
    max_rounds: int = 30
    """Rounds after which clients that were never heard keep the middle arm."""

    def __post_init__(self) -> None:
        check_range("rates.cold_rounds", self.cold_rounds, 0)
        check_range("rates.max_rounds", self.max_rounds, self.cold_rounds + 1)
        self._arms = few_rates("rates.arms", self.arms)
        self._round = 0
        self._best = np.full(self.n_clients, -1)
        self._choice = np.zeros(self.n_clients, dtype=np.int64)

    def ask(self) -> np.ndarray:
        """(K, P) with all arms in the round of trials; clients that know theirs repeat it."""
        if self._round < self.cold_rounds or self.done:
            return self.rates[:, None]
        return np.where(self._best[:, None] < 0, self._arms[None], self.rates[:, None])

    def tell(self, rewards: Rewards = None, *, reports: Reports = None, present: Present = None) -> int:
        self._choice = np.zeros(self.n_clients, dtype=np.int64)
        if not self.done and self._round >= self.cold_rounds:
            blank = np.full((self.n_clients, len(self._arms)), np.nan)
            accuracy = (reports or {}).get("local_validation", blank)
            here = np.ones(self.n_clients, dtype=bool) if present is None else np.asarray(present, dtype=bool)
            able = np.asarray(np.isfinite(accuracy).all(axis=1))
            if here.all() and not able.any():
                raise FedtailError(
                    "rates 'locally_optimal' compares models, but there is no validation data at the clients; set "
                    "data.validation"
                )
            trying = here & (self._best < 0)
            middle = len(self._arms) // 2
            self._choice[self._best < 0] = middle  # trained on all arms, like those that choose
            self._best[trying] = np.where(able, np.where(able[:, None], accuracy, 0.0).argmax(axis=1), middle)[trying]
            self._choice[trying] = self._best[trying]
        self._round += 1
        return 0

    @property
    def choice(self) -> np.ndarray:
        return self._choice.copy()

    @property
    def rates(self) -> np.ndarray:
        return self._arms[np.where(self._best < 0, len(self._arms) // 2, self._best)]

    @property
    def done(self) -> bool:
        return bool((self._best >= 0).all()) or self._round >= self.max_rounds

    def stats(self) -> dict[str, Any]:
        phase = "fixed" if self.done else "cold" if self._round < self.cold_rounds else "search"
        return {"phase": phase, "rounds": self._round, "decided": int((self._best >= 0).sum())}

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "best": self._best.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._round, self._best = state["round"], np.array(state["best"])
