"""Rates that are given: one for all clients (the "U" of the paper's tables), or one per client, for instance those that
``fedtail tune`` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtail.errors import FedtailError, check_range
from fedtail.rates.base import RATES, RateStrategy, base_rates, check_rate


@RATES.add("fixed")
class Fixed(RateStrategy):
    """Client k always resamples at ``rates[k]``.

    With ``searches`` the values are something else that a search found per client, a learning rate or a field of the
    method, and every client resamples at ``base_rate`` (one, or one per client).
    """

    title = "fixed rates"

    def __init__(
        self, n_clients: int, rates: Sequence[float], searches: str = "rate", base_rate: float | Sequence[float] = 0.6
    ) -> None:
        if len(rates) != n_clients:
            raise FedtailError(f"rates.rates has {len(rates)} values for {n_clients} clients; give one per client")
        for k, rate in enumerate(rates):
            if searches == "rate":
                check_rate(f"rates.rates[{k}]", rate)
            check_range(f"rates.rates[{k}]", rate, 0.0)
        self.n_clients, self._rates = n_clients, np.asarray(rates, dtype=np.float64)
        self.searches, self.base_rates = searches, base_rates(base_rate, n_clients)

    def ask(self) -> np.ndarray:
        return self._rates[:, None].copy()

    @property
    def rates(self) -> np.ndarray:
        return self._rates.copy()


def fixed_section(record: Mapping[str, Any]) -> dict[str, Any]:
    """The config section ``[rates]`` that keeps what a search found. record: the last of the run's history.

    Mostly the values in force; for FAST, which plays on, each client's best arm.
    """
    for name, values in record.get("searched", {}).items():
        return {"name": "fixed", "rates": list(values), "searches": name, "base_rate": list(record["rates"])}
    return {"name": "fixed", "rates": list(record.get("search", {}).get("best_arm", record["rates"]))}


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
