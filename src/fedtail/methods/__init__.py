"""One file per method: loss, groups, direction, client state, server hooks."""

from fedtail.methods.base import Batch, LocalRun, Method, Server
from fedtail.methods.class_balanced import ClassBalanced
from fedtail.methods.fedavg import FedAvg
from fedtail.methods.fedcgnm import FedCGN, FedCGNM
from fedtail.methods.fedprox import FedProx
from fedtail.methods.focal import Focal
from fedtail.methods.logistic import Logistic
from fedtail.methods.logit_adjustment import LogitAdjustment
from fedtail.methods.registry import METHODS
from fedtail.methods.scaffold import Scaffold
from fedtail.methods.trees import Trees
from fedtail.methods.weighted_ce import WeightedCE

__all__ = [
    "METHODS",
    "Batch",
    "ClassBalanced",
    "FedAvg",
    "FedCGN",
    "FedCGNM",
    "FedProx",
    "Focal",
    "LocalRun",
    "Logistic",
    "LogitAdjustment",
    "Method",
    "Scaffold",
    "Server",
    "Trees",
    "WeightedCE",
]
