"""A site's configuration file, ``site.toml``, and the ``Site`` it describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.site.identity import Identity, read_identity, read_site_file
from fedtail.federate.site.own import ImageSite, TableSite
from fedtail.federate.site.prepared import FederationSlice, SiteData
from fedtail.federate.site.site import Site
from fedtail.models.device import check_device
from fedtail.runs.build import build_federation, load_pooled
from fedtail.runs.config import load_config
from fedtail.settings import Section, checked

KINDS = ("table", "images", "slice")


class Worker(Section):
    """``[worker]``: the process that trains."""

    threads: int = Field(1, ge=1)
    """Number of torch threads."""
    memory_mb: int = Field(4096, ge=256)
    """The worker is restarted after a message if it uses more memory than this, and may never use more than twice
    this."""
    idle_minutes: float = Field(60.0, gt=0)
    """The worker exits after this long without a message; the next message starts it again."""
    device: str = "cpu"
    """Device to train on, e.g. ``cpu``, ``cuda`` or ``cuda:1``."""
    python: str = ""
    """Python interpreter with fedtail installed; defaults to the one that runs Flower."""


class Rules(Section):
    """What a site's operator decides."""

    policy: Policy = Policy()
    worker: Worker = Worker()


@dataclass(frozen=True)
class SiteConfig:
    """All of ``site.toml``."""

    file: Path
    identity: Identity
    data: dict[str, Any]
    policy: Policy
    worker: Worker

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def folder(self) -> Path:
        return self.file.parent

    def open_data(self) -> SiteData:
        """Load the site's data; one clear line if it cannot be read."""
        section = dict(self.data)
        kind = section.pop("kind", "table")
        if kind not in KINDS:
            raise one_of("data.kind", kind, KINDS)
        options: dict[str, Callable[..., SiteData]] = {"table": TableSite, "images": ImageSite, "slice": open_slice}
        opener = options[kind]
        allowed = [name for name in inspect.signature(opener).parameters if name != "folder"]
        for key in section:
            if key not in allowed:
                raise one_of(f"key of [data] with kind = {kind!r}", key, allowed)
        for key in ("path", "schema", "config", "new"):
            if key in section:
                section[key] = self.folder / section[key]
        try:
            return opener(**section)
        except TypeError as error:
            raise FedtailError(f"{str(self.file)!r}: [data] with kind = {kind!r}: {error}") from None

    def stamp(self) -> tuple[object, ...]:
        """Differs once the configuration or the data has changed: a worker that is alive holds what it read before."""
        named = [self.folder / str(self.data[key]) for key in ("path", "schema", "new") if key in self.data]
        files = [self.file, self.folder / "sites.pub", *named]
        files += [entry for file in files if file.is_dir() for entry in sorted(file.iterdir())]
        times = tuple((str(file), file.stat().st_mtime_ns if file.exists() else 0) for file in files)
        if "config" not in self.data:
            return times
        settings = load_config(self.folder / self.data["config"])  # of which a rehearsal's site uses the data only
        return (*times, repr(settings.data), settings.data_seed)

    def open_site(self) -> Site:
        """The site itself; a device that is not there is noticed here, before round 0."""
        check_device("worker.device", self.worker.device)
        return Site(self.name, self.open_data(), self.policy, self.folder, self.worker.device)


def load_site(file: str | Path) -> SiteConfig:
    """Read and check a ``site.toml``."""
    raw, identity = read_site_file(file), read_identity(file)
    rules = checked(Rules, {key: raw[key] for key in ("policy", "worker") if key in raw})
    return SiteConfig(Path(file).resolve(), identity, raw.get("data", {}), rules.policy, rules.worker)


def open_slice(config: Path, client: int) -> FederationSlice:
    """Client ``client`` of the data set a fedtail config names: for rehearsals, where no site has data of its own."""
    settings = load_config(config)
    pooled = load_pooled(settings)
    federation = build_federation(settings, pooled)
    if not 0 <= client < federation.n_clients:
        raise FedtailError(f"data.client = {client} is outside 0..{federation.n_clients - 1} of {str(config)!r}")
    return FederationSlice(federation, client, pooled.model, pooled.model_options)
