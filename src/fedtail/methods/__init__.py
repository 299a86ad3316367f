"""One file per method: loss, groups, direction, client state, server hooks."""

from fedtail.methods.base import Batch, LocalRun, Method, Server
from fedtail.methods.ccvr import CCVR
from fedtail.methods.class_balanced import ClassBalanced
from fedtail.methods.climb import CLIMB
from fedtail.methods.fedavg import FedAvg
from fedtail.methods.fedcgn import FedCGN
from fedtail.methods.fedcgnm import FedCGNM
from fedtail.methods.fedetf import FedETF
from fedtail.methods.fedlc import FedLC
from fedtail.methods.fedloge import FedLoGe
from fedtail.methods.fedprox import FedProx
from fedtail.methods.fedyoyo import FedYoYo
from fedtail.methods.focal import Focal
from fedtail.methods.grw import GRW
from fedtail.methods.logit_adjustment import LogitAdjustment
from fedtail.methods.pcn import PCN, PCNO
from fedtail.methods.registry import METHODS
from fedtail.methods.scaffold import Scaffold
from fedtail.methods.trees import Trees
from fedtail.methods.weighted_ce import WeightedCE

__all__ = [
    "CCVR",
    "CLIMB",
    "GRW",
    "METHODS",
    "PCN",
    "PCNO",
    "Batch",
    "ClassBalanced",
    "FedAvg",
    "FedCGN",
    "FedCGNM",
    "FedETF",
    "FedLC",
    "FedLoGe",
    "FedProx",
    "FedYoYo",
    "Focal",
    "LocalRun",
    "LogitAdjustment",
    "Method",
    "Scaffold",
    "Server",
    "Trees",
    "WeightedCE",
]
