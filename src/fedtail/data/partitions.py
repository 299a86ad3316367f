"""Split pooled samples over clients: IID, per-class Dirichlet, per-client Dirichlet, by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.random import generator
from fedtail.data.federation import Federation, Samples, assemble, with_groups
from fedtail.data.images.augment import check_augment
from fedtail.data.registry import Pooled
from fedtail.errors import FedtailError, one_of

PARTITIONS = ("iid", "dirichlet", "per_client", "column")


def split(
    y: np.ndarray,
    scheme: str,
    n_clients: int,
    *,
    alpha: float = 0.5,
    column: Sequence[Any] | np.ndarray | None = None,
    min_samples: int = 10,
    seed: int = 0,
) -> tuple[list[np.ndarray], list[str] | None]:
    """Indices of each client, ascending and disjoint, covering ``y``; and site names for ``column``.

    - ``iid``: stratified round-robin after shuffling.
    - ``dirichlet``: per *class*, shares over clients ~ Dir(alpha); sizes differ, the global tail is kept exactly.
      Redrawn until every client has ``min_samples``.
    - ``per_client``: per *client*, class mix ~ Dir(alpha p); equal sizes, exhausted classes are masked.
    - ``column``: one client per value of ``column``.
    """
    y = np.asarray(y)
    if scheme not in PARTITIONS:
        raise one_of("partition", scheme, PARTITIONS)
    if scheme == "column":
        if column is None:
            raise FedtailError("partition 'column' needs the column that names each sample's site")
        return _by_column(column)
    if n_clients < 1:
        raise FedtailError(f"clients = {n_clients} is not allowed; use 1 or more")
    if n_clients > len(y):
        raise FedtailError(f"clients = {n_clients} is more than the {len(y)} samples there are; use {len(y)} or fewer")
    rng = generator(seed, f"partition/{scheme}")
    if scheme == "iid":
        return _iid(y, n_clients, rng), None
    if not alpha > 0:
        raise FedtailError(f"alpha = {alpha!r} is outside (0, inf)")
    if scheme == "dirichlet":
        return _per_class(y, n_clients, alpha, min_samples, rng), None
    return _per_client(y, n_clients, alpha, rng), None


def partition(
    train: Samples | Pooled,
    test: Samples | None = None,
    *,
    scheme: str | None = None,
    clients: int = 5,
    alpha: float = 0.5,
    column: Sequence[Any] | np.ndarray | None = None,
    min_samples: int = 10,
    classes: Sequence[str] | None = None,
    validation: float | None = None,
    seed: int = 0,
    **more: Any,
) -> Federation:
    """A data set, or training and test samples, split over clients. See ``split`` for the schemes.

    By default: per-class Dirichlet, or the sites of a data set that has them; a tenth of each client's samples for
    validation, or what the data set suggests.
    """
    if isinstance(train, Pooled):
        if test is not None or column is not None or classes is not None:
            raise FedtailError("partition of a data set takes its own test samples, sites and classes")
        return federate(
            train, scheme=scheme or "auto", clients=clients, alpha=alpha, min_samples=min_samples,
            validation=validation, seed=seed, **more,
        )  # fmt: skip
    if test is None:
        raise FedtailError("partition needs test samples beside the training samples, or a data set that has both")
    n_classes = int(max(train.y.max(), test.y.max() if len(test) else 0)) + 1
    parts, sites = split(
        train.y.numpy(), scheme or "dirichlet", clients, alpha=alpha, column=column, min_samples=min_samples, seed=seed
    )
    names = classes if classes is not None else [str(c) for c in range(n_classes)]
    held = 0.1 if validation is None else validation
    return assemble(train, parts, test, classes=names, sites=sites, validation=held, seed=seed, **more)


def federate(
    pooled: Pooled,
    *,
    scheme: str = "auto",
    clients: int = 5,
    alpha: float = 0.5,
    min_samples: int = 10,
    validation: float | None = None,
    auxiliary: int = 0,
    holdout: float = 0.0,
    augment: str | None = None,
    seed: int = 0,
) -> Federation:
    """A data set -> ``Federation``, with whatever the data set itself suggests.

    ``scheme="auto"`` takes the data's own sites where it has them, else ``dirichlet``; ``augment="none"`` switches
    the suggested augmentation off. See ``split`` for the schemes.
    """
    augment = pooled.augment if augment is None else None if augment == "none" else augment
    check_augment(augment)
    if scheme == "auto":
        scheme = "dirichlet" if pooled.sites is None else "column"
    if scheme == "column" and pooled.sites is None:
        raise FedtailError(f"data.partition = 'column' needs data with sites of its own; {pooled.name!r} has none")
    federation = partition(
        pooled.train, pooled.test, scheme=scheme, clients=clients, alpha=alpha, column=pooled.sites,
        min_samples=min_samples, classes=pooled.classes, seed=seed, auxiliary=auxiliary, holdout=holdout,
        validation=pooled.validation if validation is None else validation,
        name=pooled.name, transform=pooled.transform, augment=augment, background=pooled.background,
        preprocessing=pooled.preprocessing, notes=pooled.notes,
    )  # fmt: skip
    return federation if pooled.groups is None else with_groups(federation, pooled.groups)


def _iid(y: np.ndarray, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    shuffled = rng.permutation(len(y))
    dealt = shuffled[np.argsort(y[shuffled], kind="stable")]
    return [np.sort(dealt[i::k]) for i in range(k)]


def _per_class(
    y: np.ndarray, k: int, alpha: float, min_samples: int, rng: np.random.Generator, tries: int = 1000
) -> list[np.ndarray]:
    need = min(min_samples, max(1, len(y) // (2 * k)))
    members = [np.flatnonzero(y == c) for c in np.unique(y)]
    owner = np.empty(len(y), dtype=np.int64)
    for _ in range(tries):
        sizes = np.zeros(k, dtype=np.int64)
        for index in members:
            shares = rng.dirichlet(np.full(k, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(index)).astype(int)
            pieces = np.diff(cuts, prepend=0, append=len(index))
            owner[rng.permutation(index)] = np.repeat(np.arange(k), pieces)
            sizes += pieces
        if sizes.min() >= need:
            return _of_owners(owner, sizes)
    raise FedtailError(
        f"no Dirichlet({alpha:g}) split of {len(y)} samples over {k} clients leaves every client {need} samples "
        f"after {tries} draws; use fewer clients, a larger alpha or a smaller min_samples"
    )


def _per_client(y: np.ndarray, k: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    classes, counts = np.unique(y, return_counts=True)
    left = [rng.permutation(np.flatnonzero(y == c)) for c in classes]
    taken = np.zeros(len(classes), dtype=np.int64)
    mix = rng.dirichlet(np.maximum(alpha * counts / counts.sum(), 1e-12), size=k)
    sizes = np.full(k, len(y) // k)
    sizes[: len(y) % k] += 1
    owner = np.empty(len(y), dtype=np.int64)
    for i in range(k):
        missing = int(sizes[i])
        while missing:
            open_ = (counts - taken).astype(float)
            p = mix[i] * (open_ > 0)
            p = p / p.sum() if p.sum() > 1e-300 else open_ / open_.sum()
            take = np.minimum(rng.multinomial(missing, p), counts - taken)
            for c in np.flatnonzero(take):
                owner[left[c][taken[c] : taken[c] + take[c]]] = i
            taken += take
            missing -= int(take.sum())
    return _of_owners(owner, sizes)


def _by_column(column: Sequence[Any] | np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    """One part per value, in the order of their names as text."""
    codes, values = pd.factorize(np.asarray(column), use_na_sentinel=False)
    names, rank = np.unique([str(v) for v in values], return_inverse=True)
    owner = rank[codes]
    return _of_owners(owner, np.bincount(owner, minlength=len(names))), [str(v) for v in names]


def _of_owners(owner: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Ascending indices of each of the K owners; sizes: (K,)."""
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])
