"""A federation from data of the user's own, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedtail.data.federation import Federation
from fedtail.data.partitions import SPLITTING, partition
from fedtail.data.registry import DATASETS
from fedtail.data.tables.pooled import table_from_frame
from fedtail.errors import FedtailError

SITE = "site"


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


def from_images(folder: str | Path, **options: Any) -> Federation:
    """See ``Federation.from_images``."""
    splitting = {key: options.pop(key) for key in list(options) if key in SPLITTING}
    return replace(partition(DATASETS.build("images", path=str(folder), **options), **splitting), own="images")
