"""The few rates that a strategy chooses from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtail.errors import FedtailError, check_range
from fedtail.rates.base import HIGHEST


def few_rates(key: str, rates: Sequence[float]) -> np.ndarray:
    """(P,) the rates, ascending and distinct; ``key`` is the option that lists them."""
    values = np.unique(np.atleast_1d(np.asarray(rates, dtype=np.float64)))
    if values.size == 0:
        raise FedtailError(f"{key} is empty; give at least one rate, e.g. [0.4, 0.6, 0.8]")
    for value in values:
        check_range(key, float(value), 0.0, HIGHEST)
    return np.asarray(values)
