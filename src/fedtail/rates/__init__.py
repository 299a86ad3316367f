"""One file per rate strategy: ask / tell."""

from fedtail.rates.base import RateStrategy, Setting
from fedtail.rates.clusters import ClusteredFedHOO
from fedtail.rates.fedhoo import FedHOO
from fedtail.rates.fixed import Fixed
from fedtail.rates.registry import RATES
from fedtail.rates.uniform import Uniform

__all__ = ["RATES", "ClusteredFedHOO", "FedHOO", "Fixed", "RateStrategy", "Setting", "Uniform"]
