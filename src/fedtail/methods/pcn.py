"""PCN: per-class normalization, every class its own group (Francazi et al., 2023; SPEC 3).

    x <- x - lr sum_c g_c / (||g_c|| + 1e-6)

In a federation each client does this locally; with one client it is the centralised method. With ordinary
random batches a class that is absent from a batch contributes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.methods.fedcgnm import FedCGNM
from fedtail.methods.registry import METHODS


@METHODS.add("pcn")
@dataclass(frozen=True)
class PCN(FedCGNM):
    """FedCGNM with H = C, beta = 0, delta = 1e-6."""

    name = "pcn"
    title = "PCN"
    paper = "Francazi et al., A Theoretical Analysis of the Learning Dynamics under Class Imbalance, ICML 2023"
    n_groups: int | None = None
    beta: float = 0.0
    delta: float = 1e-6
