"""One rate for every client: the "U" of the paper's tables."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedtail.rates.base import RateStrategy, check_rate
from fedtail.rates.registry import RATES


@RATES.add("uniform")
class Uniform(RateStrategy):
    """The same rate everywhere and always; rate 0 is no resampling, 1 is fully balanced. ``auto`` is what wins a race
    (``rounds.race``), which tells it by ``settle``."""

    title = "U"

    def __init__(self, n_clients: int, rate: float | Literal["auto"] = 0.6) -> None:
        self.n_clients, self.raced = n_clients, rate == "auto"
        self.settle(0.6 if rate == "auto" else rate)

    def settle(self, rate: float) -> None:
        """Use this rate from now on."""
        check_rate("rates.rate", rate)
        self.rate = float(rate)

    def ask(self) -> np.ndarray:
        return np.full((self.n_clients, 1), self.rate)

    @property
    def rates(self) -> np.ndarray:
        return self.ask()[:, 0]
