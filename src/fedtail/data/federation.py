"""The federation: pooled tensors and, per client, index views into them. Nothing is copied per client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.core.random import generator
from fedtail.errors import FedtailError
from fedtail.words import aligned, html_table

PANEL = 500
"""Most clients whose validation splits are evaluated each round."""
FEW, SHORT = 8, 12
"""What a printed federation shows: classes, clients from either end, characters of a class name."""


@dataclass(frozen=True)
class Samples:
    """Inputs and labels. Inputs are as stored (uint8 images or float features); see ``Transform``."""

    x: Tensor
    """(N, ...)."""
    y: Tensor
    """(N,) int64."""

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def counts(self, n_classes: int) -> np.ndarray:
        return np.bincount(self.y.numpy(), minlength=n_classes)

    def take(self, index: np.ndarray) -> Samples:
        i = torch.as_tensor(index)
        return Samples(self.x[i], self.y[i])


@dataclass(frozen=True)
class Transform:
    """Stored values -> model input, on whatever device the batch is: (x * scale - mean) / std per channel.

    Also part of the saved model, so that prediction treats new data the same way.
    """

    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        out = x.to(torch.float32)
        if self.scale != 1.0:
            out = out * self.scale
        if self.mean:
            shape = (len(self.mean),) + (1,) * (x.ndim - 2)
            mean = torch.tensor(self.mean, device=x.device).view(shape)
            std = torch.tensor(self.std, device=x.device).view(shape)
            out = (out - mean) / std
        return out


@dataclass(frozen=True)
class Client:
    """One client's view: pooled tensors plus its own indices."""

    index: int
    pool: Samples
    train: np.ndarray
    validation: np.ndarray
    n_classes: int
    transform: Transform
    augment: str | None
    background: int | None = None

    @cached_property
    def labels(self) -> np.ndarray:
        """Labels of the training samples, in the order of ``train``."""
        return np.asarray(self.pool.y.numpy()[self.train])

    @cached_property
    def counts(self) -> np.ndarray:
        """(C,) training samples per class; stays at the client."""
        return np.bincount(self.labels, minlength=self.n_classes)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What data say of themselves, before and after they are split over clients."""

    name: str = "data"
    transform: Transform = field(default_factory=Transform)
    augment: str | None = None
    """``"crop-flip"`` (pad 4, random crop, horizontal flip), ``"flip"`` or None."""
    background: int | None = None
    """The class that means "nothing found" (no defect, no attack), where there is one: adds ``defect_score``."""
    preprocessing: dict[str, Any] = field(default_factory=dict)
    """How raw user data became samples; JSON, saved with the model for prediction."""
    model: str = "mlp"
    """The model that suits the data, where none is named, and"""
    model_options: dict[str, Any] = field(default_factory=dict)
    """its options."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the data (repairs, columns left out, synthetic origin ...)."""
    label_type: str = ""
    """What a model answers with: ``str``, ``int``, ``float`` or ``bool``; empty if not known."""

    def described(self) -> dict[str, Any]:
        """What these data say of themselves, by name, for others made of them."""
        return {f.name: getattr(self, f.name) for f in fields(Described)}


@dataclass(frozen=True)
class Federation(Described):
    """Data of K clients with private validation splits, and a test set: made by ``fedtail.partition``, or from data of
    your own by ``from_tables``, ``from_images``, ``from_arrays``, ``from_datasets``."""

    pool: Samples
    train: tuple[np.ndarray, ...]
    """Per client: its training indices into the pool."""
    validation: tuple[np.ndarray, ...]
    """Per client: its private validation indices; never trained on."""
    test: Samples
    classes: tuple[str, ...]
    sites: tuple[str, ...]
    auxiliary: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Pool indices of the small balanced set a server-side monitor may use; in no client's training split."""
    holdout: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Pool indices of validation samples that the server owns; in no client's splits."""
    test_clients: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """(N,) the client that each test sample belongs to, -1 for none; empty where the test set is nobody's own."""
    clusters: tuple[str, ...] = ()
    """A label per client (region, machine type ...) for rate searches over clusters of clients; empty if none."""
    own: str = ""
    """The data set whose suggestions ``fit`` follows, where the data are the user's own: ``table`` or ``images``."""

    def __post_init__(self) -> None:
        if not self.train:
            raise FedtailError("a federation needs at least one client")
        empty = [self.sites[k] for k, index in enumerate(self.train) if len(index) == 0]
        if empty:
            raise FedtailError(f"no training samples at {', '.join(map(repr, empty[:5]))}; drop or merge these clients")

    def _table(self) -> tuple[str, list[list[str]]]:
        """A row per site with its samples per class, not the data; the middle left out where there are many."""
        table, places = self.label_map(), np.arange(self.n_classes)
        rare = np.lexsort((-places, table.sum(0)))[:FEW]
        named = [str(self.classes[c])[:SHORT] for c in rare]
        rows = [["site", "samples", *named]]
        many = self.n_clients > 2 * FEW
        chosen = [*range(FEW), *range(self.n_clients - FEW, self.n_clients)] if many else range(self.n_clients)
        for k in chosen:
            rows.append([self.sites[k][: 2 * SHORT], f"{table[k].sum():,}", *(f"{n:,}" for n in table[k, rare])])
        if many:
            rows.insert(FEW + 1, ["…"] * len(rows[0]))
        test = self.test.counts(self.n_classes)
        rows.append(["test", f"{test.sum():,}", *(f"{n:,}" for n in test[rare])])
        more = f", the {FEW} rarest shown" if self.n_classes > FEW else ""
        return f"{self.name}: {self.n_clients:,} clients, {self.n_classes} classes{more}", rows

    def __repr__(self) -> str:
        said, rows = self._table()
        return "\n".join([said, *aligned(rows)])

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    @property
    def n_clients(self) -> int:
        return len(self.train)

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.pool.x.shape[1:])

    @property
    def sizes(self) -> np.ndarray:
        """(K,) training samples per client."""
        return np.array([len(i) for i in self.train])

    def client(self, k: int) -> Client:
        """Client k's view, made once: every round asks for its labels."""
        if k not in self._clients:
            own, transform, augment = (self.train[k], self.validation[k]), self.transform, self.augment
            self._clients[k] = Client(k, self.pool, *own, self.n_classes, transform, augment, self.background)
        return self._clients[k]

    @cached_property
    def _clients(self) -> dict[int, Client]:
        return {}

    @cached_property
    def validation_rows(self) -> np.ndarray:
        """Pool indices of the validation splits of the ``panel``."""
        return np.concatenate([self.validation[k] for k in self.panel])

    @cached_property
    def panel(self) -> list[int]:
        """The clients whose validation splits are used: all, or ``PANEL`` random ones, so that validation stays
        cheap."""
        if self.n_clients <= PANEL:
            return list(range(self.n_clients))
        picked = generator(0, "validation/panel").choice(self.n_clients, size=PANEL, replace=False)
        return [int(k) for k in np.sort(picked)]

    def own_tests(self) -> dict[int, np.ndarray]:
        """Client -> its rows of the test set, for the clients in the panel; all other rows belong to client -1."""
        if not self.test_clients.size or not len(self.test):
            return {-1: np.arange(len(self.test))}
        owner = np.where(np.isin(self.test_clients, self.panel), self.test_clients, -1)
        return {int(k): np.flatnonzero(owner == k) for k in np.unique(owner)}

    def label_map(self) -> np.ndarray:
        """(K, C) training samples per client and class. In a real federation, nobody has this table."""
        y = self.pool.y.numpy()
        return np.stack([np.bincount(y[i], minlength=self.n_classes) for i in self.train])

    @classmethod
    def from_tables(cls, tables: Any, label: str, site: str | None = None, **options: Any) -> Federation:
        """Your own tables: ``{site: DataFrame}``, one DataFrame or file with a ``site`` column, or a folder or glob
        of files, one per site.

        Args:
            label: the column that holds the class.
            options: of the data set ``table`` (``exclude``, ``categories`` ...) and of ``fedtail.partition``
                (``validation``, ``seed`` ...).
        """
        from fedtail.data.own import from_tables  # which needs this module

        return from_tables(tables, label, site, **options)

    @classmethod
    def from_rows(cls, x: Any, y: Any, sites: Any = None, **options: Any) -> Federation:
        """Rows of all sites in one DataFrame or array.

        Args:
            x: (N, ...) inputs. Rows of a table may hold numbers, categories and gaps, and are scaled.
            y: (N,) labels of any type, with which the model will answer.
            sites: (N,) the site of each row, or the column of a DataFrame; without it, all rows are one site's.
            options: as of ``from_tables``; for inputs that are no rows of a table, as of ``from_arrays``.
        """
        from fedtail.data.own import from_rows  # which needs this module

        return from_rows(x, y, sites, **options)

    @classmethod
    def from_images(cls, folder: Any, **options: Any) -> Federation:
        """Your own images in folders ``site/class/*`` or ``class/*``; ``options`` of the data set ``images``
        (``size``, ``background``, ...) and of ``fedtail.partition``."""
        from fedtail.data.own import from_images  # which needs this module

        return from_images(folder, **options)

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[tuple[Any, Any]],
        test: tuple[Any, Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
        sites: Sequence[str] | None = None,
        test_fraction: float = 0.2,
        validation: float = 0.1,
        seed: int = 0,
        **more: Any,
    ) -> Federation:
        """One (x, y) pair per client and a common test pair; numpy arrays, tensors or lists.

        x: (samples, ...) numbers; uint8 images stay uint8. y: (samples,) class names or whole numbers; with
        ``classes`` given, those names or their positions. Without ``test`` each client gives up a stratified
        ``test_fraction`` of its samples.
        """
        from fedtail.data.own import from_arrays  # which needs this module

        return from_arrays(clients, test, classes, sites, test_fraction, validation=validation, seed=seed, **more)

    @classmethod
    def from_datasets(cls, clients: Sequence[Any], test: Any = None, **more: Any) -> Federation:
        """Any torch ``Dataset`` of (input, label) pairs per client, read once into memory; see ``from_arrays``."""
        from fedtail.data.own import read_dataset  # which needs this module

        pairs = [read_dataset(d, f"client {k}") for k, d in enumerate(clients)]
        return cls.from_arrays(pairs, None if test is None else read_dataset(test, "the test set"), **more)

    @classmethod
    def from_huggingface(cls, data: Any, label: str = "", site: str | None = None, **options: Any) -> Federation:
        """A Hugging Face ``Dataset`` or ``DatasetDict`` (its ``test`` is the test set), the folder of one, or a
        ``FederatedDataset`` of flwr-datasets, whose partitions are the sites.

        Args:
            label: the column that holds the class; by default the first ``ClassLabel``.
            site: the column that names the site.
            options: as of ``from_images``, if a column has pictures, else as of ``from_tables``.
        """
        from fedtail.data.own import from_huggingface  # which needs this module

        return from_huggingface(data, label, site, **options)


def assemble(
    pool: Samples,
    parts: Sequence[np.ndarray],
    test: Samples,
    *,
    classes: Sequence[str],
    sites: Sequence[str] | None = None,
    validation: float = 0.1,
    auxiliary: int = 0,
    holdout: float = 0.0,
    seed: int = 0,
    **more: Any,
) -> Federation:
    """Cut each client's part into training, private validation and, if asked, auxiliary samples and a share
    ``holdout`` of each client's data that the server gets to own."""
    y = pool.y.numpy()
    aux = np.empty(0, dtype=np.int64)
    if auxiliary:
        parts, aux = take_auxiliary(y, parts, auxiliary, len(classes), generator(seed, "auxiliary"))

    def cut(parts: Sequence[np.ndarray], share: float, what: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        draws = [generator(seed, what, k) for k in range(len(parts))]
        cuts = [stratified_holdout(y, np.asarray(p), share, d, what) for p, d in zip(parts, draws, strict=True)]
        return [rest for rest, _ in cuts], [held for _, held in cuts]

    parts, given = cut(parts, holdout, "holdout") if holdout else (parts, [])
    train, held = cut(parts, validation, "validation")
    who = tuple(sites) if sites is not None else tuple(f"client {k}" for k in range(len(parts)))
    server = np.sort(np.concatenate(given)) if given else np.empty(0, dtype=np.int64)
    return Federation(pool, tuple(train), tuple(held), test, tuple(classes), who, auxiliary=aux, holdout=server, **more)


def stratified_holdout(
    y: np.ndarray, index: np.ndarray, fraction: float, rng: np.random.Generator, what: str = "validation"
) -> tuple[np.ndarray, np.ndarray]:
    """(rest, held out): ``fraction`` of each class of ``index``, never the last sample of a class.

    Fractions of a sample are settled at random, so that small classes are held out in proportion on average.
    """
    if not 0 <= fraction < 1:
        raise FedtailError(f"{what} = {fraction!r} is outside [0, 1)")
    index = np.sort(index)
    order = np.argsort(y[index], kind="stable")
    edges = np.flatnonzero(np.diff(y[index][order])) + 1
    out = np.zeros(len(index), dtype=bool)
    for members in np.split(order, edges) if len(order) else []:
        want = fraction * len(members)
        n = min(int(want) + int(rng.random() < want - int(want)), len(members) - 1)
        if n > 0:
            out[rng.choice(members, size=n, replace=False)] = True
    return index[~out], index[out]


def take_auxiliary(
    y: np.ndarray, parts: Sequence[np.ndarray], per_class: int, n_classes: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """Take up to ``per_class`` samples of each class out of the clients' parts: no more than a tenth of a class, or
    five where that is no more than half of it, and never a client's last sample."""
    everything = np.concatenate(list(parts))
    order = everything[np.argsort(y[everything], kind="stable")]
    stops = np.searchsorted(y[order], np.arange(n_classes + 1))
    aux = np.zeros(len(y), dtype=bool)
    for members in (order[a:b] for a, b in pairwise(stops)):
        spared = max(len(members) // 10, min(5, len(members) // 2))
        aux[rng.choice(members, size=min(per_class, spared), replace=False)] = True
    kept = []
    for part in parts:
        rows = np.sort(np.asarray(part))
        rest = rows[~aux[rows]]
        kept.append(rest if len(rest) else rows[:1])
        aux[kept[-1]] = False
    return kept, np.flatnonzero(aux)
