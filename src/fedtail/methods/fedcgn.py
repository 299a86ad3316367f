"""FedCGN: class-grouped normalized gradients, i.e. FedCGNM without momentum."""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.methods.fedcgnm import FedCGNM
from fedtail.methods.registry import METHODS


@METHODS.add("fedcgn")
@dataclass(frozen=True)
class FedCGN(FedCGNM):
    """x <- x - lr sum_h g_h / (||g_h|| + delta)."""

    title = "FedCGN"
    beta: float = 0.0
