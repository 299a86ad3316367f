"""One file per rate strategy: ask / tell."""

from fedtail.rates.base import RATES, Fixed, RateStrategy, Setting, Uniform
from fedtail.rates.clusters import ClusteredFedHOO
from fedtail.rates.fedhoo import FedHOO

__all__ = ["RATES", "ClusteredFedHOO", "FedHOO", "Fixed", "RateStrategy", "Setting", "Uniform"]
