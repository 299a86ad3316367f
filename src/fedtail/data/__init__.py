"""Data sources, the long tail, partitions: everything up to a ``Federation``."""

from fedtail.data.blobs import blobs
from fedtail.data.digits import digits
from fedtail.data.federation import Client, Federation, Samples, Transform
from fedtail.data.longtail import long_tail_counts, long_tail_index
from fedtail.data.partition import PARTITIONS, partition, split
from fedtail.data.registry import DATASETS, Pooled

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Client",
    "Federation",
    "Pooled",
    "Samples",
    "Transform",
    "blobs",
    "digits",
    "long_tail_counts",
    "long_tail_index",
    "partition",
    "split",
]
