"""Data sources, the long tail, partitions: everything up to a ``Federation``."""

from fedtail.data.adult import adult
from fedtail.data.blobs import blobs
from fedtail.data.chips import chips
from fedtail.data.cifar import cifar10, cifar100
from fedtail.data.digits import digits
from fedtail.data.elpv import elpv
from fedtail.data.elsewhere import sites
from fedtail.data.federation import Client, Federation, Samples, Transform
from fedtail.data.images import images
from fedtail.data.longtail import long_tail_counts, long_tail_index
from fedtail.data.partition import PARTITIONS, federate, partition, split
from fedtail.data.registry import DATASETS, Pooled
from fedtail.data.sources import SOURCES
from fedtail.data.tables import site_tables, table, table_from_frame
from fedtail.data.unsw import unsw

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "SOURCES",
    "Client",
    "Federation",
    "Pooled",
    "Samples",
    "Transform",
    "adult",
    "blobs",
    "chips",
    "cifar10",
    "cifar100",
    "digits",
    "elpv",
    "federate",
    "images",
    "long_tail_counts",
    "long_tail_index",
    "partition",
    "site_tables",
    "sites",
    "split",
    "table",
    "table_from_frame",
    "unsw",
]
