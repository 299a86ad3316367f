"""Who a site is and where its server is: what its service must know of ``site.toml``, without torch."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError, one_of

SECTIONS = ("site", "data", "policy", "worker")


@dataclass(frozen=True)
class Identity:
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
    return raw


def read_identity(file: str | Path) -> Identity:
    """``[site]`` of a ``site.toml``."""
    section = dict(read_site_file(file).get("site", {}))
    section.pop("apps", None)  # hashes; ``load_site`` reads them
    known = tuple(Identity.__dataclass_fields__)
    for key, value in section.items():
        if key not in known:
            raise one_of(f"key of [site] in {Path(file).name}", key, known)
        if not isinstance(value, str):
            raise FedtailError(f"{str(file)!r}: [site] {key} = {value!r} is not a string; put it in quotes")
    if not section.get("name"):
        raise FedtailError(f"{str(Path(file).resolve())!r}: [site] needs a name")
    return Identity(**section)
