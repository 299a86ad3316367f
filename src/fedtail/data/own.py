"""A federation from data of the user's own, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedtail.data.federation import Federation
from fedtail.data.partitions import SPLITTING, partition
from fedtail.data.registry import DATASETS, Pooled
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
        return partition(table_from_frame(pd.concat(named, ignore_index=True), label, SITE, **options), **splitting)
    if isinstance(tables, pd.DataFrame):
        return partition(table_from_frame(tables, label, site, **options), **splitting)
    one = Path(tables).is_file()
    if site is not None:
        options["site"] = site
    pooled: Pooled = DATASETS.build("table" if one else "site_tables", path=str(tables), label=label, **options)
    return partition(pooled, **splitting)


def from_images(folder: str | Path, **options: Any) -> Federation:
    """See ``Federation.from_images``."""
    splitting = {key: options.pop(key) for key in list(options) if key in SPLITTING}
    return partition(DATASETS.build("images", path=str(folder), **options), **splitting)
