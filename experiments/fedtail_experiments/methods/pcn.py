"""PCN: per-class normalization, every class its own group (Francazi et al., 2023).

    x <- x - lr sum_c g_c / (||g_c|| + 1e-6)

In a federation each client does this locally; with one client it is the centralised method. The authors' sampler
draws every class into every batch: in proportion (PCN), or in equal numbers (PCN+O, oversampling). A class that is
absent from a batch contributes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.core.sampling import SAMPLERS
from fedtail.errors import one_of
from fedtail.methods.fedcgnm import FedCGNM


@dataclass(frozen=True)
class PCN(FedCGNM):
    """FedCGNM with H = C, beta = 0, delta = 1e-6, and batches that hold every class."""

    title = "PCN"
    paper = "Francazi et al., A Theoretical Analysis of the Learning Dynamics under Class Imbalance, ICML 2023"
    n_groups: int | None = None
    beta: float = 0.0
    delta: float = 1e-6
    batches: str = "stratified"
    """``stratified``, ``balanced`` or ``shuffled``; see ``fedtail.core.sampling``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches not in SAMPLERS:
            raise one_of("method.batches", self.batches, SAMPLERS)

    @property
    def sampler(self) -> str:
        return self.batches


@dataclass(frozen=True)
class PCNO(PCN):
    """PCN+O: equal numbers of every class in every batch; the resampling rate has no effect."""

    title = "PCN+O"
    batches: str = "balanced"
