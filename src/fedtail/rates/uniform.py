"""One rate for every client: the "U" of the paper's tables."""

from __future__ import annotations

import numpy as np

from fedtail.rates.base import RateStrategy, check_rate
from fedtail.rates.registry import RATES


@RATES.add("uniform")
class Uniform(RateStrategy):
    """The same rate everywhere and always; rate 0 is no resampling, 1 is fully balanced."""

    title = "U"

    def __init__(self, n_clients: int, rate: float = 0.6) -> None:
        check_rate("rates.rate", rate)
        self.n_clients, self.rate = n_clients, float(rate)

    def ask(self) -> np.ndarray:
        return np.full((self.n_clients, 1), self.rate)

    @property
    def rates(self) -> np.ndarray:
        return self.ask()[:, 0]
