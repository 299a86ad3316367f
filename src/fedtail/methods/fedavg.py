"""FedAvg (McMahan et al., 2017): plain SGD at the clients, weighted mean at the server."""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.methods.base import Method
from fedtail.methods.registry import METHODS


@METHODS.add("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """x_k <- x_k - lr (g + weight_decay x_k);  x <- sum_k p_k x_k."""

    title = "FedAvg"
    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
