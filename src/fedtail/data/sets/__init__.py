"""Data sets with a name, one file each; importing this package registers them."""

from fedtail.data.sets import at_sites, blobs, cifar, digits

__all__ = ["at_sites", "blobs", "cifar", "digits"]
