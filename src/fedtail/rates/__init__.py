"""One file per rate strategy: ask / tell."""

from fedtail.rates.base import RateStrategy
from fedtail.rates.fixed import Fixed
from fedtail.rates.registry import RATES
from fedtail.rates.uniform import Uniform

__all__ = ["RATES", "Fixed", "RateStrategy", "Uniform"]
