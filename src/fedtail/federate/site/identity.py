"""Who a site is and where its server is: what its service must know of ``site.toml``, without torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError, one_of
from fedtail.settings import Section, checked

SECTIONS = ("site", "data", "policy", "worker")


class Identity(Section):
    """``[site]``."""

    name: str
    server: str = ""
    """``host:port`` of the federation's server."""


def read_site_file(file: str | Path) -> dict[str, Any]:
    """The sections of a ``site.toml``; one clear line if it is none."""
    path = Path(file).resolve()
    if not path.is_file():
        raise FedtailError(f"site configuration {str(path)!r} does not exist")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedtailError(f"site configuration {str(path)!r} is not valid TOML: {error}") from None
    for key in raw:
        if key not in SECTIONS:
            raise one_of(f"section of {path.name}", key, SECTIONS)
    if not raw.get("site", {}).get("name"):
        raise FedtailError(f"{str(path)!r}: [site] needs a name")
    return raw


def read_identity(file: str | Path) -> Identity:
    """``[site]`` of a ``site.toml``."""
    return checked(Identity, read_site_file(file)["site"], lambda *path: f"[site] {'.'.join(path)}")
