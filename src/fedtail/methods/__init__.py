"""One file per method: loss, groups, direction, client state, server hooks."""

from fedtail.methods.base import Batch, LocalRun, Method, Server
from fedtail.methods.fedavg import FedAvg
from fedtail.methods.fedcgn import FedCGN
from fedtail.methods.fedcgnm import FedCGNM
from fedtail.methods.pcn import PCN
from fedtail.methods.registry import METHODS

__all__ = ["METHODS", "PCN", "Batch", "FedAvg", "FedCGN", "FedCGNM", "LocalRun", "Method", "Server"]
