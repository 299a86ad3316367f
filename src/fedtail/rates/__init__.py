"""One file per rate strategy: ask / tell."""

from fedtail.rates.base import RATES, RateStrategy, Setting
from fedtail.rates.clusters import ClusteredFedHOO
from fedtail.rates.fedhoo import FedHOO
from fedtail.rates.fixed import Fixed, Uniform

__all__ = ["RATES", "ClusteredFedHOO", "FedHOO", "Fixed", "RateStrategy", "Setting", "Uniform"]
