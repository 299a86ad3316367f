"""Split pooled samples over clients: IID, Dirichlet per class, few labels each, by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedtail.core.random import generator
from fedtail.data.federation import PANEL, Federation, Samples, Transform, assemble
from fedtail.data.images.augment import check_augment
from fedtail.data.registry import Pooled
from fedtail.errors import FedtailError, one_of
from fedtail.settings import CLIENTS, PARTITIONS, DataSettings, checked
from fedtail.words import plural

DRAWS = 1000
"""Dirichlet splits that are drawn before ``min_samples`` is given up."""


def split(
    y: np.ndarray,
    partition: str,
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
    - ``labels``: every client has two classes only, each class is shared evenly by those that have it.
    - ``column``: one client per value of ``column``.
    """
    y = np.asarray(y)
    if partition == "column":
        if column is None:
            raise FedtailError("partition 'column' needs the column that names each sample's site")
        return _by_column(column)
    if n_clients < 1:
        raise FedtailError(f"clients = {n_clients} is not allowed; use 1 or more")
    if n_clients > len(y):
        raise FedtailError(f"clients = {n_clients} exceeds the {len(y)} available samples; use {len(y)} or fewer")
    if not alpha > 0:
        raise FedtailError(f"alpha = {alpha!r} is outside (0, inf)")
    rng = generator(seed, f"partition/{partition}")
    if partition == "iid":
        return _iid(y, n_clients, rng), None
    if partition == "dirichlet":
        return _per_class(y, n_clients, alpha, min_samples, rng), None
    if partition == "labels":
        return _two_labels(y, n_clients, rng), None
    raise one_of("partition", partition, PARTITIONS)


def partition(
    train: Samples | Pooled,
    test: Samples | None = None,
    *,
    column: Sequence[Any] | np.ndarray | None = None,
    classes: Sequence[str] | None = None,
    transform: Transform | None = None,
    name: str = "data",
    **settings: Any,
) -> Federation:
    """Split a data set, or training and test samples, across clients.

    By default: per-class Dirichlet, or the data's own sites if it has them (``column``); a tenth of each client's
    samples for validation, or what the data set suggests.

    Args:
        settings: settings of the section ``data`` that control the split: ``clients``, ``partition``, ``alpha``,
            ``min_samples``, ``validation``, ``auxiliary``, ``holdout``, ``augment``, ``seed``; see docs/settings.md.
    """
    for key in settings:
        if key not in SPLITTING:
            raise one_of("setting of a partition", key, SPLITTING)
    data = checked(DataSettings, settings)
    if isinstance(train, Pooled):
        if test is not None or column is not None or classes is not None:
            raise FedtailError("a data set is split with its own test samples, sites and classes; do not pass them")
        return federate(train, data)
    if test is None:
        raise FedtailError("partition needs test samples as well as training samples, or a data set that has both")
    n_classes = int(max(train.y.max(), test.y.max() if len(test) else 0)) + 1
    pooled = Pooled(
        train=train,
        test=test,
        classes=tuple(classes) if classes is not None else tuple(str(c) for c in range(n_classes)),
        name=name,
        transform=transform or Transform(),
        sites=None if column is None else np.asarray(column),
    )
    return federate(pooled, data)


SPLITTING = tuple(key for key in DataSettings.model_fields if key not in ("name", "dir"))


def federate(pooled: Pooled, data: DataSettings) -> Federation:
    """A data set -> ``Federation``, with whatever the data set itself suggests."""
    augment = pooled.augment if data.augment is None else None if data.augment == "none" else data.augment
    check_augment(augment)
    how = data.partition
    if how == "auto":
        how = "dirichlet" if pooled.sites is None else "column"
    if how == "column" and pooled.sites is None:
        raise FedtailError(f"data.partition = 'column' needs data that has its own sites; {pooled.name!r} has none")
    seed = data.seed or 0
    parts, sites = split(
        pooled.train.y.numpy(),
        how,
        CLIENTS if data.clients is None else data.clients,
        alpha=data.alpha,
        column=pooled.sites,
        min_samples=data.min_samples,
        seed=seed,
    )
    if how == "column":
        _check_unsplit(data, pooled.name, len(parts))
    federation = assemble(
        pooled.train,
        parts,
        pooled.test,
        classes=pooled.classes,
        sites=sites,
        validation=pooled.validation if data.validation is None else data.validation,
        auxiliary=data.auxiliary or 0,
        holdout=data.holdout,
        seed=seed,
        test_clients=_test_clients(pooled, parts, sites if how == "column" else None, seed),
        **pooled.described() | {"augment": augment, "notes": (*pooled.notes, *_invented(pooled, how, data))},
    )
    return federation if pooled.clusters is None else with_clusters(federation, pooled.clusters)


def _check_unsplit(data: DataSettings, name: str, sites: int) -> None:
    """Refuse settings that split samples over clients beside data that have ``sites`` of their own."""
    fields = DataSettings.model_fields
    silent = {"clients": (None, sites), **{key: (fields[key].default,) for key in ("alpha", "min_samples")}}
    for key, values in silent.items():
        if (value := getattr(data, key)) not in values:
            raise FedtailError(
                f"data.{key} = {value} has no effect: {name!r} has {plural(sites, 'site')} of its own, and each is a "
                "client; leave it out, or have sites made up with data.partition=dirichlet"
            )


def _test_clients(pooled: Pooled, parts: Sequence[np.ndarray], sites: Sequence[str] | None, seed: int) -> np.ndarray:
    """(N,) the client of each test sample: the site that the data name, or, where sites are dealt out of a pooled set,
    dealt out too, so that every client is tested on the class mix it has."""
    if len(parts) > PANEL:
        return np.empty(0, dtype=np.int64)
    if sites is None:
        y, n = pooled.train.y.numpy(), len(pooled.classes)
        counts = np.stack([np.bincount(y[part], minlength=n) for part in parts]).astype(np.float64)
        shares = counts / np.maximum(counts.sum(0), 1)
        shares[:, counts.sum(0) == 0] = 1 / len(parts)
        dealt = by_shares(pooled.test.y.numpy(), shares, generator(seed, "partition/test"))
        owner = np.empty(len(pooled.test), dtype=np.int64)
        owner[np.concatenate(dealt)] = np.repeat(np.arange(len(dealt)), [len(rows) for rows in dealt])
        return owner
    if pooled.test_sites is None:
        return np.empty(0, dtype=np.int64)
    number = {name: k for k, name in enumerate(sites)}
    return np.array([number.get(str(name), -1) for name in pooled.test_sites], dtype=np.int64)


def _invented(pooled: Pooled, how: str, data: DataSettings) -> list[str]:
    """A table or a folder without sites gets made-up ones; a reader of its results should know."""
    kind = pooled.preprocessing.get("kind")
    if pooled.sites is not None or kind not in ("table", "images") or pooled.preprocessing.get("strict"):
        return []
    drawn = f"{how} split" + (f", alpha {data.alpha:g}" if how == "dirichlet" else "")
    if kind == "images":
        return [f"the folder has no sites, so they were made up ({drawn}); name yours with SITE/CLASS/*.png"]
    return [f"no site column was given, so sites were made up ({drawn}); name yours with --site COLUMN"]


def _iid(y: np.ndarray, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    shuffled = rng.permutation(len(y))
    dealt = shuffled[np.argsort(y[shuffled], kind="stable")]
    return [np.sort(dealt[i::k]) for i in range(k)]


def _per_class(y: np.ndarray, k: int, alpha: float, min_samples: int, rng: np.random.Generator) -> list[np.ndarray]:
    usual = DataSettings.model_fields["min_samples"].default  # which small data need not reach
    need = min_samples if min_samples != usual else min(usual, max(1, len(y) // (2 * k)))
    members = [np.flatnonzero(y == c) for c in np.unique(y)]
    owner = np.empty(len(y), dtype=np.int64)
    for _ in range(DRAWS):
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
        f"after {DRAWS:,} draws; use fewer clients, a larger alpha or a smaller min_samples"
    )


def _two_labels(y: np.ndarray, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Each client takes the two classes that fewest have so far, ties at random; a class goes evenly to its clients."""
    classes = np.unique(y)
    if 2 * k < len(classes):
        least = -(-len(classes) // 2)
        raise FedtailError(f"{k} clients with 2 labels each cannot cover {len(classes)} classes; use {least} clients")
    holds = np.zeros((k, len(classes)), dtype=bool)
    for row in holds:
        row[np.lexsort((rng.random(len(classes)), holds.sum(0)))[:2]] = True
    owner = np.empty(len(y), dtype=np.int64)
    for c, label in enumerate(classes):
        members = rng.permutation(np.flatnonzero(y == label))
        owner[members] = np.resize(rng.permutation(np.flatnonzero(holds[:, c])), len(members))
    return _of_owners(owner, np.bincount(owner, minlength=k))


def by_shares(y: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """shares: (K, C), columns sum to 1. Fractions of a sample go to the largest remainders."""
    k, owner = len(shares), np.empty(len(y), dtype=np.int64)
    for c in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == c))
        exact = shares[:, c] * len(members)
        pieces = np.floor(exact + 1e-9).astype(np.int64)
        pieces[np.argsort(pieces - exact, kind="stable")[: len(members) - pieces.sum()]] += 1
        owner[members] = np.repeat(np.arange(k), pieces)
    return _of_owners(owner, np.bincount(owner, minlength=k))


def _by_column(column: Sequence[Any] | np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    """One part per value, in the order of their names as text."""
    codes, values = pd.factorize(np.asarray(column), use_na_sentinel=False)
    names, rank = np.unique([str(v) for v in values], return_inverse=True)
    owner = rank[codes]
    return _of_owners(owner, np.bincount(owner, minlength=len(names))), [str(v) for v in names]


def _of_owners(owner: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Ascending indices of each of the K owners; sizes: (K,)."""
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def with_clusters(federation: Federation, labels: np.ndarray) -> Federation:
    """Label each client by the most frequent of its samples' ``labels`` (N,), ties to the first in order."""
    names = []
    for index in federation.train:
        values, counts = np.unique(np.asarray(labels)[index].astype(str), return_counts=True)
        names.append(str(values[counts.argmax()]))
    return replace(federation, clusters=tuple(names))
