"""Data sets by name: ``fedtail.datasets.load("adult", imbalance=10)``."""

from __future__ import annotations

import inspect as signatures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtail.data import DATASETS, SOURCES, Pooled
from fedtail.data.inspection import Inspection, inspect
from fedtail.data.own import whole
from fedtail.data.sources import is_here, locate

__all__ = ["Entry", "Inspection", "get", "inspect", "load", "names", "overview"]


@dataclass(frozen=True)
class Entry:
    """One line of ``overview``."""

    name: str
    about: str
    options: tuple[str, ...]
    state: str
    """``built in``, ``here``, ``download`` or ``by hand``; ``yours`` for data the user brings."""
    terms: str


def load(name: str, data_dir: str | Path | None = None, **options: Any) -> Pooled:
    """Load a data set by name, before it is split across clients.

    >>> from fedtail.data import partition
    >>> pooled = load("digits", imbalance=50)
    >>> partition(pooled, clients=5, alpha=0.5).n_clients
    5

    Args:
        name: one of ``names()``.
        data_dir: folder with data files; defaults to $FEDTAIL_DATA, then the user's cache.
        options: options of the data set, for instance ``imbalance``.
    """
    if data_dir is not None and "data_dir" in DATASETS.options(name):
        options["data_dir"] = str(data_dir)
    return whole(name, DATASETS.build(name, **options))


def names() -> list[str]:
    """Every data set that ``load`` knows."""
    return list(DATASETS)


def get(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Fetch a public data set if it is not there yet. Its folder, or None where nothing needs fetching."""
    return locate(name, data_dir) if DATASETS[name] is not None and name in SOURCES else None


def overview(data_dir: str | Path | None = None) -> list[Entry]:
    """Every data set with what it is and whether its files are here."""
    return [_entry(name, data_dir) for name in names()]


def _entry(name: str, data_dir: str | Path | None) -> Entry:
    about = (signatures.getdoc(DATASETS[name]) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
    options = DATASETS.options(name)
    shown = tuple(key for key in options if key not in ("seed", "data_dir", "test_fraction", "cache"))
    if name in SOURCES:
        state = "here" if is_here(name, data_dir) else "download" if SOURCES[name].remotes else "by hand"
        return Entry(name, about, shown, state, SOURCES[name].terms)
    yours = any(default is signatures.Parameter.empty for default in options.values())
    return Entry(name, about, shown, "yours" if yours else "built in", "")
