"""The registry of rate strategies; each strategy's file adds itself."""

from __future__ import annotations

from fedtail.rates.base import RateStrategy
from fedtail.registry import Registry

RATES: Registry[RateStrategy] = Registry("rate strategy", "rates", given=("n_clients",))
