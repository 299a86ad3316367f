"""Data sets with a name, one file each; importing this package registers them."""

from fedtail.data.sets import adult, at_sites, blobs, cifar, digits, unsw

__all__ = ["adult", "at_sites", "blobs", "cifar", "digits", "unsw"]
