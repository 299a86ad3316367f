"""A site's configuration file, ``site.toml``: light, since the service that reads it stays for months."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedtail.errors import FedtailError, one_of
from fedtail.federate.protocol.policy import Policy
from fedtail.settings import Section, checked

SECTIONS = ("site", "data", "policy", "worker")


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


class Identity(Section):
    """``[site]``."""

    name: str
    server: str = ""
    """``host:port`` of the federation's server."""


@dataclass(frozen=True)
class SiteConfig:
    """All of ``site.toml``."""

    file: Path
    name: str
    server: str
    data: dict[str, Any]
    policy: Policy
    worker: Worker

    @property
    def folder(self) -> Path:
        return self.file.parent


def load_site(file: str | Path) -> SiteConfig:
    """Read and check a ``site.toml``; one clear line if it is none."""
    path = Path(file).resolve()
    path = path / "site.toml" if path.is_dir() else path
    if not path.is_file():
        raise FedtailError(f"site configuration {str(path)!r} does not exist")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedtailError(f"site configuration {str(path)!r} is not valid TOML: {error}") from None
    for key in raw:
        if key not in SECTIONS:
            raise one_of(f"section of {path.name}", key, SECTIONS)
        if not isinstance(raw[key], dict):
            raise FedtailError(f"{str(path)!r}: {key} = {raw[key]!r} must be a table; write [{key}] above its keys")
    if not raw.get("site", {}).get("name"):
        raise FedtailError(f"{str(path)!r}: [site] needs a name")
    identity = checked(Identity, raw["site"], lambda *path: f"[site] {'.'.join(path)}")
    rules = checked(Rules, {key: raw[key] for key in ("policy", "worker") if key in raw})
    return SiteConfig(path, identity.name, identity.server, raw.get("data", {}), rules.policy, rules.worker)
