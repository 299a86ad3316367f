"""The registry of data sets: ``name(**options) -> Pooled``: samples before they are split over clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.data.federation import Described, Samples
from fedtail.registry import Registry


@dataclass(frozen=True)
class Pooled(Described):
    """A data set before partition."""

    train: Samples
    test: Samples
    classes: tuple[str, ...]
    sites: np.ndarray | None = None
    """(N,) site of each training sample, where the data has sites of its own."""
    test_sites: np.ndarray | None = None
    """(N_test,) site of each test sample, where it is known."""
    clusters: np.ndarray | None = None
    """(N,) cluster of each training sample's site, where the data names one: for rate searches over clusters."""
    validation: float = 0.1
    """The share of each client's samples that makes its private validation split, unless the user says otherwise."""


OWN_DATA: dict[str, Any] = {
    "local.lr": "auto",
    "run.metric": "macro_f1",
    "run.select": "best",
    "run.patience": 15,
}
"""Defaults for data that nobody here has seen, by dotted key: settings that find themselves."""
OWN_TABLES: dict[str, Any] = {
    **OWN_DATA,
    "local.batch_size": "auto",
    "server.optimizer": "auto",
    "decision.goal": "macro_f1",
}
"""Defaults for networks on tables: many small sites get on faster with an optimizer at the server, and a table's rows
are enough to find on private validation how far answers should lean to rare classes (docs/evidence.md)."""
TREES: dict[str, Any] = {
    "method.name": "trees",
    "run.rounds": 200,
    "run.metric": "macro_f1",
    "run.select": "best",
    "run.patience": 20,
    "decision.goal": "macro_f1",
}
"""Defaults for tables where nobody has asked for a network: trees are ahead on most tables (docs/evidence.md)."""
SUGGESTED: dict[str, dict[str, Any]] = {
    "table": OWN_TABLES,
    "site_tables": OWN_TABLES,
    "images": OWN_DATA,
    "arrays": OWN_DATA,
    "digits": {"local.lr": 0.4, "local.batch_size": 32},
}
"""Data set -> defaults of a run on it where they are not those of the settings themselves."""
FROM_SCRATCH: dict[str, Any] = {
    "data.largest": 48,
    "model.name": "small_cnn",
    "model.channels": [16, 32, 64],
    "local.optimizer": "adam",
    "local.lr": 1e-3,
    "local.batch_size": 16,
    "run.select": "last",
    "run.patience": 0,
}
"""Defaults for images on a CPU without a pretrained encoder: what trains in minutes there (docs/images.md). A race of
learning rates would compare networks that all answer one class still."""
HEAD: dict[str, Any] = {"method.name": "logistic", "run.metric": "macro_f1", "run.select": "best"}
"""Defaults for a linear head on a frozen encoder, where nobody has set what only networks have (docs/images.md)."""
FROZEN: dict[str, Any] = {"run.metric": "macro_f1"}
"""Defaults for a head on a frozen encoder in place of ``OWN_DATA``: its input has one scale whatever the images, and a
hundred validation images choose learning rates and rounds by luck (docs/images.md)."""
DATASETS: Registry[Pooled] = Registry("data set", "data", group="datasets")
