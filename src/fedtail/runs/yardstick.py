"""Yardsticks: what a federation is measured against, as files in the folder ``yardsticks`` beside the runs.

``alone``: every site trains by itself. ``pooled``: one site has all data. ``boosting`` and ``logistic``: what a table's
owner would do with all data and scikit-learn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError
from fedtail.files import write_atomically
from fedtail.rounds.history import plain

FOLDER = "yardsticks"
TITLES = {
    "alone": "each site alone",
    "pooled": "all data pooled",
    "boosting": "pooled gradient boosting",
    "logistic": "pooled logistic regression",
}


@dataclass(frozen=True)
class AtSite:
    """One site by itself, and the federated model at that site; macro F1 each, None where it is not defined."""

    site: str
    samples: int
    test: float | None
    """What the model that the site trained alone reaches on the common test set."""
    own: float | None
    """What that model reaches on the site's own test samples, or its validation split where the test set is nobody's
    own."""
    federated: float | None
    """What the federated model reaches on the same samples."""


@dataclass(frozen=True)
class Yardstick:
    """One yardstick under one seed."""

    kind: str
    seed: int
    run: str
    """Name of the run folder that it is measured against."""
    test: dict[str, Any]
    """Test metrics; of ``alone`` their means over sites."""
    seconds: float
    sites: tuple[AtSite, ...] = field(default=())
    confusions: dict[str, list[list[int]]] = field(default_factory=dict)
    """Site -> counts on its own test rows, row = true class; empty where the test set is nobody's own."""

    @property
    def title(self) -> str:
        return TITLES.get(self.kind, self.kind)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plain(asdict(self)), indent=1))


def load_yardstick(path: Path) -> Yardstick:
    """Read one back."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Yardstick(**{**found, "sites": tuple(AtSite(**site) for site in found["sites"])})
    except (ValueError, TypeError, KeyError) as error:
        raise FedtailError(f"{path}: not a yardstick ({error}); delete it") from None


def beside(folders: Iterable[Path]) -> list[Yardstick]:
    """The yardsticks that lie beside run folders and were measured against one of them."""
    known = list(folders)
    found = [
        load_yardstick(path)
        for parent in dict.fromkeys(folder.parent for folder in known)
        for path in sorted((parent / FOLDER).glob("*.json"))
    ]
    names = {folder.name for folder in known}
    return [yardstick for yardstick in found if yardstick.run in names]
