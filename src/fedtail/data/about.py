"""A federation as a server knows it: names and sizes. The simulator also knows the labels; a real server does not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedtail.data.federation import Federation, Transform

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
    return About(
        name=federation.name,
        sites=federation.sites,
        classes=federation.classes,
        input_shape=federation.input_shape,
        sizes=federation.sizes,
        validation_sizes=tuple(len(v) for v in federation.validation),
        transform=federation.transform,
        preprocessing=federation.preprocessing,
        notes=federation.notes,
        label_type=federation.label_type,
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
