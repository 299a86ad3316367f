"""How a client's local epoch is cut into batches.

- ``shuffled``: the resampled epoch in random order; a rare class may be absent from a batch.
- ``stratified``: the same epoch, classes spread evenly, so that every batch has each class in proportion (PCN's own
  sampler).
- ``balanced``: equal numbers of every class in every batch, rare classes reshuffled as often as needed and the most
  frequent class seen once per epoch (PCN+O). The resampling rate has no part in it.
"""

from __future__ import annotations

import math

import numpy as np

from fedtail.core.resampling import resample_epoch, resampled_counts
from fedtail.errors import one_of

SAMPLERS = ("shuffled", "stratified", "balanced")


def local_batches(
    labels: np.ndarray,
    rate: float,
    rng: np.random.Generator,
    *,
    sampler: str = "shuffled",
    batch_size: int,
    epochs: int,
    n_classes: int | None = None,
    epoch_length: str = "inflated",
) -> tuple[np.ndarray, np.ndarray]:
    """The batches of a whole local run, one after another as positions into ``labels``, and the size of each; each
    epoch's last one is short."""
    if sampler not in SAMPLERS:
        raise one_of("sampler", sampler, SAMPLERS)
    taken: list[np.ndarray] = []
    sizes: list[int] = []
    for _ in range(epochs):
        if sampler == "balanced":
            batches = balanced_epoch(labels, batch_size, rng)
            taken += batches
            sizes += map(len, batches)
            continue
        epoch = resample_epoch(labels, rate, rng, n_classes=n_classes, epoch_length=epoch_length)
        if sampler == "stratified":
            epoch = spread_classes(np.asarray(labels), epoch, rng)
        taken.append(epoch)
        whole, rest = divmod(len(epoch), batch_size)
        sizes += [batch_size] * whole + [rest] * (rest > 0)
    index = taken[0] if len(taken) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *taken])
    return index, np.array(sizes, dtype=np.int64)


def epoch_counts(counts: np.ndarray, rate: float, sampler: str, batch_size: int) -> np.ndarray:
    """(C,) class sizes of one local epoch under a sampler."""
    if sampler != "balanced":
        return resampled_counts(counts, rate)
    each, n_batches = _balanced_shape(np.asarray(counts), batch_size)
    return np.where(np.asarray(counts) > 0, each * n_batches, 0).astype(np.int64)


def spread_classes(labels: np.ndarray, epoch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The epoch reordered so that the samples of a class lie evenly apart, each class from a random start.

    In any run of B consecutive samples the count of a class with share q differs from q B by at most 1 + C q.
    """
    place = np.empty(len(epoch))
    y = labels[epoch]
    for c in np.unique(y):
        members = np.flatnonzero(y == c)
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return epoch[np.argsort(place, kind="stable")]


def balanced_epoch(labels: np.ndarray, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Batches with B // classes samples of every class present; at least 1, at most the largest class."""
    y = np.asarray(labels)
    if not len(y):
        return []
    each, n_batches = _balanced_shape(np.bincount(y), batch_size)
    streams = []
    for c in np.unique(y):
        members = np.flatnonzero(y == c)
        passes = math.ceil(each * n_batches / len(members))
        stream = np.concatenate([rng.permutation(members) for _ in range(passes)])
        streams.append(stream[: each * n_batches].reshape(n_batches, each))
    return list(np.concatenate(streams, axis=1))


def _balanced_shape(counts: np.ndarray, batch_size: int) -> tuple[int, int]:
    """Samples per class and batch, and batches per epoch."""
    present, most = int((counts > 0).sum()), int(counts.max(initial=0))
    each = max(1, min(batch_size // max(present, 1), most))
    return each, math.ceil(most / each)
