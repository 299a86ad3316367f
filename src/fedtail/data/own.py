"""A federation from data of the user's own, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.federation import Federation
from fedtail.data.partitions import SPLITTING, partition
from fedtail.data.registry import DATASETS
from fedtail.data.tables.pooled import table_from_frame
from fedtail.errors import FedtailError

SITE, LABEL = "site", "label"


def from_tables(
    tables: Mapping[str, pd.DataFrame] | pd.DataFrame | str | Path, label: str, site: str | None = None, **options: Any
) -> Federation:
    """See ``Federation.from_tables``."""
    splitting = {key: options.pop(key) for key in list(options) if key in SPLITTING}
    if isinstance(tables, Mapping):
        if not tables or site is not None:
            raise FedtailError("from_tables() takes one table per site without `site`, or one table with `site`")
        named = [frame.assign(**{SITE: name}) for name, frame in tables.items()]
        pooled = table_from_frame(pd.concat(named, ignore_index=True), label, SITE, **options)
    elif isinstance(tables, pd.DataFrame):
        pooled = table_from_frame(tables, label, site, **options)
    else:
        if site is not None:
            options["site"] = site
        name = "table" if Path(tables).is_file() else "site_tables"
        pooled = DATASETS.build(name, path=str(tables), label=label, **options)
    return replace(partition(pooled, **splitting), own="table")


def from_rows(x: Any, y: Any, sites: Any = None, **options: Any) -> Federation:
    """See ``Federation.from_rows``."""
    given = x if isinstance(x, pd.DataFrame) else np.asarray(x)
    labels, owners = np.asarray(y), None if sites is None else np.asarray(sites)
    for name, values in (("y", labels), ("sites", owners)):
        if values is not None and values.shape != (len(given),):
            raise FedtailError(f"{name} has shape {values.shape}, but there are {len(given):,} rows; give one per row")
    if not isinstance(given, pd.DataFrame) and given.ndim != 2:
        names = np.zeros(1) if owners is None else np.unique(owners)
        parts = [np.arange(len(labels)) if owners is None else np.flatnonzero(owners == name) for name in names]
        where = None if owners is None else [str(name) for name in names]
        return Federation.from_arrays([(given[part], labels[part]) for part in parts], sites=where, **options)
    if not isinstance(given, pd.DataFrame):
        given = pd.DataFrame(given, columns=[str(i) for i in range(given.shape[1])])
        if given.shape[1] and all(kind.kind in "biuf" for kind in given.dtypes):
            options.setdefault("numbers", list(given.columns))
    label, site = (next(n for n in (what, f"{what}_", f"__{what}__") if n not in given) for what in (LABEL, SITE))
    frame = given.assign(**{label: labels})
    if owners is None:
        alone: dict[str, Any] = (
            {"clients": 1, "partition": "iid"} if not {"clients", "partition"} & options.keys() else {}
        )
        return from_tables(frame, label, **alone, **options)
    return from_tables(frame.assign(**{site: owners.astype(str)}), label, site, **options)


def from_images(folder: str | Path, **options: Any) -> Federation:
    """See ``Federation.from_images``."""
    splitting = {key: options.pop(key) for key in list(options) if key in SPLITTING}
    return replace(partition(DATASETS.build("images", path=str(folder), **options), **splitting), own="images")
