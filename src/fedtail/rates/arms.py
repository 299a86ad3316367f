"""The few rates that arm-based strategies choose from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtail.errors import FedtailError, check_range


def check_arms(arms: Sequence[float]) -> np.ndarray:
    """(P,) ascending and distinct."""
    values = np.unique(np.atleast_1d(np.asarray(arms, dtype=np.float64)))
    if values.size == 0:
        raise FedtailError("rates.arms is empty; give at least one rate, e.g. [0.4, 0.6, 0.8]")
    for value in values:
        check_range("rates.arms", float(value), 0.0)
    return np.asarray(values)
