"""A federation as a server knows it: names and sizes. The simulator also knows the labels; a real server does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtail.data.federation import Federation, Transform


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
    label_map: np.ndarray | None = None
    """(K, C) training samples per client and class; in simulation only."""

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
        test_counts=federation.test.counts(federation.n_classes),
        label_map=federation.label_map(),
    )
