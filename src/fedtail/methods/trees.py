"""Trees: gradient boosting from sums of integers over sites, where other methods train networks.

In every round each class gets a tree (two classes share one), grown level by level: sites add up gradients and Hessians
per node, column and bin, and the best splits follow from the sums. The trees are those of all rows pooled. See
``fedtail.boosting``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.errors import FedtailError, check_range
from fedtail.methods.base import Method
from fedtail.methods.registry import METHODS


@METHODS.add("trees", apart=True)
@dataclass(frozen=True)
class Trees(Method):
    """Gradient boosting; ``fedtail.boosting.predictor.Plan`` holds one of these."""

    title = "Trees"
    paper = "Friedman, Greedy Function Approximation: A Gradient Boosting Machine, Annals of Statistics 29 (2001)"
    wire = "sums of gradients and Hessians per node, column and bin"
    tunable = ()

    lr: float = 0.1
    """What a tree's values are multiplied with."""
    leaves: int = 31
    depth: int = 8
    bins: int = 128
    """Bins per number, cut at quantiles in which all classes weigh the same."""
    least_rows: int = 5
    """Rows of a leaf over all sites, at least."""
    power: float = 0.5
    """A row weighs as much as its class's share to minus this; probabilities are corrected for it."""
    column_share: float = 0.7
    """The share of the columns that the trees of a round may ask for, drawn anew for each round."""
    site: bool = True
    """Whether the row's site is a column, where the data name sites, but never under ``blind``; missing if unknown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise FedtailError("method.weight_decay has no effect on trees; leave it out")
        check_range("method.lr", self.lr, 0.0, 1.0, open_low=True)
        check_range("method.leaves", self.leaves, 2, 256)
        check_range("method.depth", self.depth, 1, 12)
        check_range("method.bins", self.bins, 2, 254)
        check_range("method.least_rows", self.least_rows, 1)
        check_range("method.power", self.power, 0.0, 1.0)
        check_range("method.column_share", self.column_share, 0.0, 1.0, open_low=True)

    @property
    def only_sums(self) -> bool:
        return True
