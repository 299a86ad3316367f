"""The registry of rate strategies; each strategy's file adds itself."""

from __future__ import annotations

from fedtail.core.registry import Registry
from fedtail.rates.base import RateStrategy

RATES: Registry[RateStrategy] = Registry("rate strategy", "rates", given=("n_clients",))
