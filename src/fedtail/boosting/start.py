"""What is agreed before the first tree: the plan, and what bins and counts settle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtail.boosting.bins import Bins, Column
from fedtail.boosting.histograms import Fields


@dataclass(frozen=True)
class Plan:
    """What is agreed before the first sum."""

    columns: tuple[Column, ...]
    n_classes: int
    rounds: int
    lr: float = 0.1
    leaves: int = 31
    depth: int = 8
    bins: int = 128
    least_rows: int = 5
    power: float = 0.5
    """A row weighs as much as its class's share to minus this; probabilities are corrected for it."""
    patience: int = 0
    """End after so many rounds without a smaller loss on held-out rows; 0: never."""

    @property
    def trees(self) -> int:
        """Trees per round: one per class, or one for two classes."""
        return 1 if self.n_classes == 2 else self.n_classes


@dataclass(frozen=True)
class Start:
    """What bins and counts settle: rows become ``Rows`` by it."""

    bins: Bins
    counts: np.ndarray
    """(C,) training rows over all sites."""
    weights: np.ndarray
    """(C,) of a row of each class, 1 on average."""
    scores: np.ndarray
    """(K,) before the first tree: the weighted classes' shares."""
    fields: Fields

    @classmethod
    def of(cls, plan: Plan, bins: Bins, counts: np.ndarray) -> Start:
        share = np.maximum(counts, 0.5) / counts.sum()
        weights = share**-plan.power
        weights *= counts.sum() / (counts * weights).sum()
        score = np.log(share * weights / (share * weights).sum())
        scores = score[1:] - score[:1] if plan.trees == 1 else score - score.mean()
        fields = Fields.of(int(counts.sum()), float(counts @ weights))
        return cls(bins, counts, weights, scores, fields)

    @property
    def correction(self) -> np.ndarray:
        """(C,) added to log-probabilities of the weighted classes to have those of the classes as they are."""
        return np.asarray(-np.log(self.weights))
