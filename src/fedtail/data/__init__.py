"""Data sources, the long tail, partitions: everything up to a ``Federation``."""

from fedtail.data import sets
from fedtail.data.federation import Client, Federation, Samples, Transform
from fedtail.data.images import folders  # registers "images"
from fedtail.data.partitions import federate, partition, split
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.sets import long_tail_counts, long_tail_index
from fedtail.data.sources import SOURCES
from fedtail.data.tables.pooled import table, table_from_frame
from fedtail.data.tables.sites import site_tables

__all__ = [
    "DATASETS",
    "SOURCES",
    "Client",
    "Federation",
    "Pooled",
    "Samples",
    "Transform",
    "federate",
    "folders",
    "long_tail_counts",
    "long_tail_index",
    "partition",
    "sets",
    "site_tables",
    "split",
    "table",
    "table_from_frame",
]
