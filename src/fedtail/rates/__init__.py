"""One file per rate strategy: ask / tell."""

from fedtail.rates.base import RateStrategy, Setting
from fedtail.rates.clusters import ClusteredFedHOO
from fedtail.rates.fast import FAST
from fedtail.rates.fedhoo import FedHOO
from fedtail.rates.fixed import Fixed
from fedtail.rates.grid import Grid
from fedtail.rates.hoo import HOO
from fedtail.rates.locally_optimal import LocallyOptimal
from fedtail.rates.random_settle import RandomSettle
from fedtail.rates.registry import RATES
from fedtail.rates.schedule import Schedule
from fedtail.rates.uniform import Uniform

__all__ = [
    "FAST",
    "HOO",
    "RATES",
    "ClusteredFedHOO",
    "FedHOO",
    "Fixed",
    "Grid",
    "LocallyOptimal",
    "RandomSettle",
    "RateStrategy",
    "Schedule",
    "Setting",
    "Uniform",
]
