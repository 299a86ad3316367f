"""A site's own rows: a table, or a folder of images for each class. Splits and draws are keyed as in the simulator, so
that the same files give the same model there."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Client, Samples, Transform, stratified_holdout
from fedtail.data.images.decode import decode
from fedtail.data.images.folders import scan
from fedtail.data.tables.encode import encode_site
from fedtail.data.tables.schema import TableSchema, load_schema
from fedtail.data.tables.sites import read_site
from fedtail.data.tables.sketch import numbers_of
from fedtail.errors import FedtailError, check_range, one_of
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import Job
from fedtail.federate.site.config import SiteConfig
from fedtail.federate.site.prepared import FederationSlice, SiteData
from fedtail.runs.build import build_federation, load_pooled
from fedtail.runs.config import load_config
from fedtail.runs.judged import Judged, judge
from fedtail.runs.saved import SavedModel


class OwnRows:
    """Labelled rows, of which shares are held out for tests and validation."""

    def __init__(self, y: np.ndarray, purpose: str, validation: float, test: float, new: str | Path) -> None:
        """purpose: of the random draws; new: a file of later rows, on which the site judges trained models."""
        check_range("data.test", test, 0.0, 1.0, open_high=True)
        check_range("data.validation", validation, 0.0, 1.0, open_high=True)
        self.y, self.purpose, self.validation, self.test_share, self.new = y, purpose, validation, test, new
        self.strata = y

    def unstratified(self) -> Self:
        out = copy.copy(self)
        out.strata = np.zeros_like(self.y)
        return out

    def judged(self, model: SavedModel) -> Judged:
        if not self.new:
            raise CodedError("data", "this site names no rows to judge a model on: set new under [data] in site.toml")
        return judge(model, Path(self.new))

    def test(self, index: int, job: Job) -> np.ndarray:
        return self._split(index, job.seed)[1]

    def _split(self, index: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(rest, test) rows."""
        return stratified_holdout(
            self.strata, np.arange(len(self.y)), self.test_share, generator(seed, self.purpose, index)
        )

    def _client(self, index: int, job: Job, samples: Samples, transform: Transform, augment: str | None) -> Client:
        rng = generator(job.seed, "validation", index)
        train, held = stratified_holdout(self.strata, self._split(index, job.seed)[0], self.validation, rng)
        return Client(index, samples, train, held, job.n_classes, transform, augment)


class TableSite(OwnRows):
    """One file under a schema all sites agreed on (``fedtail data schema`` proposes one)."""

    def __init__(
        self,
        path: str | Path,
        schema: str | Path,
        *,
        new: str | Path = "",
        validation: float = 0.1,
        test: float = 0.2,
        min_count: int = 5,
    ) -> None:
        self.agreed: TableSchema = load_schema(schema).unfitted()
        self.table = read_site(path, self.agreed)
        if not len(self.table):
            raise FedtailError(f"table {str(path)!r} has no rows with a label")
        super().__init__(self.table.y, "site_tables/test", validation, test, new)
        self.min_count = min_count

    def schema(self) -> dict[str, Any]:
        return table_schema(self.agreed)

    def columns(self, index: int, seed: int) -> list[np.ndarray]:
        return list(numbers_of(self.agreed, self.table.columns, self._split(index, seed)[0]))

    def client(self, index: int, job: Job) -> Client:
        fitted = TableSchema.from_dict(job.preprocessing)
        check_declared(fitted, self.agreed)
        return self._client(index, job, encode_site(self.table, fitted), Transform(), None)


class ImageSite(OwnRows):
    """``path/class/*.png``. Classes, size and channels are part of what sites agree on, so ``site.toml`` names them."""

    min_count = 1

    def __init__(
        self,
        path: str | Path,
        classes: Sequence[str],
        size: int | Sequence[int],
        channels: int = 3,
        *,
        validation: float = 0.1,
        test: float = 0.15,
        augment: str | None = "flip",
        new: str | Path = "",
    ) -> None:
        if channels not in (1, 3):
            raise FedtailError(f"data.channels = {channels!r} is not allowed; use 1 (grey) or 3 (colour)")
        listing = scan(Path(path).expanduser())
        if listing.sites is not None:
            raise FedtailError(
                f"{str(path)!r} must contain one folder per class; it seems to contain folders of several sites"
            )
        unknown = sorted(set(listing.classes) - set(classes))
        if unknown:
            raise one_of("class folder", unknown[0], classes)
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        decoded = decode(listing.root, listing.files, (height, width), channels)
        if decoded.bad:
            first, reason = min(decoded.bad.items())
            raise FedtailError(f"cannot read {listing.files[first]} ({reason}); repair or delete it")
        self.classes, self.augment = tuple(classes), augment
        y = np.array([self.classes.index(c) for c in listing.classes])
        self.samples = Samples(decoded.x, torch.from_numpy(y))
        super().__init__(y, "images/test", validation, test, new)

    def schema(self) -> dict[str, Any]:
        return image_schema(self.classes, self.samples.x.shape[1:], self.augment)

    def columns(self, index: int, seed: int) -> list[np.ndarray]:
        pixels = self.samples.x[torch.as_tensor(self._split(index, seed)[0])].to(torch.float64) / 255
        return [channel.reshape(-1).numpy() for channel in pixels.unbind(1)]

    def client(self, index: int, job: Job) -> Client:
        return self._client(index, job, self.samples, job.transform, job.augment)


def table_schema(schema: TableSchema) -> dict[str, Any]:
    """What sites with tables agree on; no counts."""
    return {
        "kind": "table",
        "name": "site tables",
        "classes": list(schema.classes),
        "columns": [f"{c.name} ({c.kind})" for c in schema.columns],
        "table": schema.to_dict(),
        "model": "auto",
    }


def image_schema(classes: Sequence[str], shape: Sequence[int], augment: str | None) -> dict[str, Any]:
    """What sites with images agree on."""
    return {
        "kind": "images",
        "name": "site images",
        "classes": list(classes),
        "input_shape": list(shape),
        "augment": None if augment == "none" else augment,
        "model": "auto",
    }


def check_declared(told: TableSchema, own: TableSchema) -> None:
    """Raise unless a common schema is this site's with a scaling: names, kinds, levels, marks of missing values."""
    there, here = ([(c.name, c.kind, c.levels, c.buckets, c.marks) for c in s.columns] for s in (told, own))
    if not told.fitted or there != here:
        raise CodedError("data", "the server's schema is not the one this site agreed to")


# -- what ``site.toml`` names --------------------------------------------------------------------------------------


def open_slice(config: Path, client: int) -> FederationSlice:
    """Client ``client`` of the data set a fedtail config names: for rehearsals, where no site has data of its own."""
    settings = load_config(config)
    pooled = load_pooled(settings)
    federation = build_federation(settings, pooled)
    if not 0 <= client < federation.n_clients:
        raise FedtailError(f"data.client = {client} is outside 0..{federation.n_clients - 1} of {str(config)!r}")
    return FederationSlice(federation, client, pooled.model, pooled.model_options)


KINDS: dict[str, Callable[..., SiteData]] = {"table": TableSite, "images": ImageSite, "slice": open_slice}


def open_data(config: SiteConfig) -> SiteData:
    """Load a site's data; one clear line if they cannot be read."""
    section = dict(config.data)
    kind = section.pop("kind", "table")
    if kind not in KINDS:
        raise one_of("data.kind", kind, KINDS)
    allowed = list(inspect.signature(KINDS[kind]).parameters)
    for key in section:
        if key not in allowed:
            raise one_of(f"key of [data] with kind = {kind!r}", key, allowed)
    for key in ("path", "schema", "config", "new"):
        if not isinstance(section.get(key, ""), str):
            raise FedtailError(
                f"{str(config.file)!r}: [data] {key} = {section[key]!r} must be text, the path of a file"
            )
        if key in section:
            section[key] = config.folder / Path(section[key]).expanduser()
    try:
        return KINDS[kind](**section)
    except TypeError as error:
        raise FedtailError(f"{str(config.file)!r}: [data] with kind = {kind!r}: {error}") from None


def stamp(config: SiteConfig) -> tuple[object, ...]:
    """Differs once the configuration or the data has changed: a worker that is alive holds what it read before."""
    given = [str(config.data[key]) for key in ("path", "schema", "new") if key in config.data]
    named = [config.folder / Path(path).expanduser() for path in given]
    files = [config.file, config.folder / "sites.pub", *named]
    files += [entry for file in files if file.is_dir() for entry in sorted(file.iterdir())]
    times = tuple((str(file), file.stat().st_mtime_ns if file.exists() else 0) for file in files)
    if "config" not in config.data:
        return times
    settings = load_config(config.folder / config.data["config"])  # of which a rehearsal's site uses the data only
    return (*times, repr(settings.data), settings.data_seed)
