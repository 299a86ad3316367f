"""Which Flower apps a site runs: fedtail's own, and those that its file lists."""

from __future__ import annotations

from pathlib import Path

from fedtail.federate.operate.bundle import own_hash
from fedtail.federate.site.config import load_site


def site_apps(folder: Path) -> str:
    """Their hashes, as the SuperNode is told them. A ``site.toml`` that the worker would refuse is refused here."""
    return ",".join([own_hash(), *load_site(folder / "site.toml").apps])
