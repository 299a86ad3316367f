"""Look at a federation before training: who has which classes, how skewed, and what grouping each site would make."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedtail.core.grouping import group_classes
from fedtail.core.resampling import resampled_counts
from fedtail.data.federation import Federation, Transform
from fedtail.errors import check_range


@dataclass(frozen=True)
class Inspection:
    """The site-by-class table of a federation and what follows from it at one resampling rate."""

    federation: Federation
    rate: float
    n_groups: int
    groups: np.ndarray
    """(K, C) group of each class at each site after resampling, 0 = majority; -1 where the site lacks the class."""
    epoch: np.ndarray
    """(K,) samples per epoch after resampling."""

    @cached_property
    def table(self) -> np.ndarray:
        """(K, C) training samples."""
        return self.federation.label_map()

    @cached_property
    def test(self) -> np.ndarray:
        """(C,) test samples."""
        return self.federation.test.counts(self.federation.n_classes)

    @cached_property
    def total(self) -> np.ndarray:
        """(C,) training samples over all sites."""
        return np.asarray(self.table.sum(0))

    @cached_property
    def order(self) -> np.ndarray:
        """(C,) the classes, rarest first."""
        return np.lexsort((-np.arange(len(self.total)), self.total))

    @cached_property
    def imbalance(self) -> np.ndarray:
        """(K,) most frequent over least frequent class *present* at the site."""
        return np.array([ratio(row) for row in self.table])

    def missing(self, k: int) -> tuple[str, ...]:
        """Classes that site k has no sample of, though some site has."""
        return tuple(self.federation.classes[c] for c in np.flatnonzero((self.table[k] == 0) & (self.total > 0)))

    @property
    def skew(self) -> float:
        """Mean total-variation distance between a site's class mix and the global one, weighted by site size:
        0 for identical mixes, towards 1 when sites have nothing in common."""
        sizes = self.table.sum(1, keepdims=True)
        mixes, overall = self.table / np.maximum(sizes, 1), self.total / self.total.sum()
        return float((0.5 * np.abs(mixes - overall).sum(1) * sizes[:, 0]).sum() / sizes.sum())

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.federation.name,
            "input_shape": list(self.federation.input_shape),
            "classes": list(self.federation.classes),
            "train": self.total.tolist(),
            "test": self.test.tolist(),
            "imbalance": ratio(self.total),
            "skew": self.skew,
            "rate": self.rate,
            "sites": [
                {
                    "site": site,
                    "counts": self.table[k].tolist(),
                    "train": int(self.table[k].sum()),
                    "validation": len(self.federation.validation[k]),
                    "imbalance": float(self.imbalance[k]),
                    "missing": list(self.missing(k)),
                    "groups": self.groups[k].tolist(),
                    "resampled_epoch": int(self.epoch[k]),
                }
                for k, site in enumerate(self.federation.sites)
            ],
            "notes": list(self.federation.notes),
        }


def inspect(federation: Federation, rate: float = 0.6, n_groups: int = 2) -> Inspection:
    """Count, compare and group; see ``Inspection``."""
    check_range("rate", rate, 0.0)
    check_range("groups", n_groups, 1)
    # sites with the same counts group alike: many small clients share few distinct rows
    rows, back = np.unique(federation.label_map(), axis=0, return_inverse=True)
    resampled = [resampled_counts(row, rate) for row in rows]
    grouped = np.array([np.where(row > 0, group_classes(row, n_groups), -1) for row in resampled])
    back = back.reshape(-1)
    return Inspection(federation, rate, n_groups, grouped[back], np.array([row.sum() for row in resampled])[back])


def ratio(counts: np.ndarray) -> float:
    """Largest over smallest count among those above 0."""
    present = counts[counts > 0]
    return float(present.max() / present.min()) if present.size else float("nan")


DIGESTED = 2048
"""Inputs that a digest reads of each part: enough to notice other data, and quick for any number."""


@dataclass(frozen=True)
class About:
    """What a run folder says of the data, with nothing of the data itself."""

    name: str
    sites: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    sizes: np.ndarray
    """(K,) training samples."""
    validation_sizes: Sequence[int]
    transform: Transform = field(default_factory=Transform)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    test_counts: np.ndarray | None = None
    """(C,) test samples per class, where the server holds a test set."""
    encoder: dict[str, Any] = field(default_factory=dict)
    """The encoder whose features were trained on, as ``models.encoders.Encoding`` writes it; empty if none."""
    label_type: str = ""
    """What the model answers with; see ``Federation``."""
    label_map: np.ndarray | None = None
    """(K, C) training samples per client and class; in simulation only."""
    digest: str = ""
    """What tells the same data, split in the same way, from any other; in simulation only."""

    @property
    def train_counts(self) -> np.ndarray | None:
        """(C,) training samples per class; in simulation only."""
        return None if self.label_map is None else self.label_map.sum(0)


def describe(federation: Federation) -> About:
    """Everything about a federation that is in this process."""
    names = ("name", "sites", "classes", "input_shape", "sizes", "transform", "preprocessing", "notes", "label_type")
    return About(
        **{name: getattr(federation, name) for name in names},
        validation_sizes=tuple(len(v) for v in federation.validation),
        test_counts=federation.test.counts(federation.n_classes),
        label_map=federation.label_map(),
        digest=digest(federation),
    )


def digest(federation: Federation) -> str:
    """Return a short hash of labels, splits and evenly spaced inputs: the same data give the same one anywhere."""
    digested = hashlib.sha256(repr((federation.classes, federation.sites, tuple(federation.input_shape))).encode())
    for samples in (federation.pool, federation.test):
        digested.update(samples.y.numpy().astype("<i8").tobytes())
        rows = np.unique(np.linspace(0, max(len(samples) - 1, 0), min(len(samples), DIGESTED)).astype(np.int64))
        digested.update(np.ascontiguousarray(samples.x[torch.as_tensor(rows)].numpy()).tobytes())
    for index in (*federation.train, *federation.validation):
        digested.update(np.asarray(index, dtype="<i8").tobytes())
    return digested.hexdigest()[:16]
