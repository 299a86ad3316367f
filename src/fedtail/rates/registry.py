"""The registry of rate strategies; each strategy's file adds itself."""

from __future__ import annotations

from typing import Any

from fedtail.errors import FedtailError
from fedtail.rates.base import RateStrategy
from fedtail.registry import Registry


def _own_strategy(name: str, found: Any) -> Any:
    if not (isinstance(found, type) and issubclass(found, RateStrategy)):
        raise FedtailError(f"rate strategy {name!r} is not a subclass of fedtail.rates.RateStrategy")
    found.name = name
    return found


RATES: Registry[RateStrategy] = Registry("rate strategy", "rates", given=("n_clients",), adapt=_own_strategy)
