"""A given rate per client, for instance one that ``fedtail tune`` found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtail.core.errors import FedtailError, check_range
from fedtail.rates.base import RateStrategy
from fedtail.rates.registry import RATES


@RATES.add("fixed")
class Fixed(RateStrategy):
    """Client k always resamples at ``rates[k]``."""

    name = "fixed"

    def __init__(self, n_clients: int, rates: Sequence[float]) -> None:
        if len(rates) != n_clients:
            raise FedtailError(f"rates.rates has {len(rates)} values for {n_clients} clients; give one per client")
        for k, rate in enumerate(rates):
            check_range(f"rates.rates[{k}]", rate, 0.0)
        self.n_clients, self._rates = n_clients, np.asarray(rates, dtype=np.float64)

    def ask(self) -> np.ndarray:
        return self._rates[:, None].copy()

    def tell(
        self,
        rewards: np.ndarray | None = None,
        *,
        reports: dict[str, np.ndarray] | None = None,
        present: np.ndarray | None = None,
    ) -> int:
        return 0

    @property
    def rates(self) -> np.ndarray:
        return self._rates.copy()
