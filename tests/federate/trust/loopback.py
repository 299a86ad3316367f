"""A federation in this process whose sites have keys and lists of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedtail.data.tables.schema import schema_text
from fedtail.data.tables.sites import propose_schema
from fedtail.federate.operate.certificates import make_site_key
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Errors, InProcess, Take
from fedtail.federate.protocol.wire import Parts
from fedtail.federate.site.own import TableSite
from fedtail.federate.site.prepared import FederationSlice, SiteData
from fedtail.federate.site.site import Site
from fedtail.runs.build import build_federation, load_pooled
from fedtail.runs.config import check_config
from fedtail.settings import Settings

RARE = "Jane Doe"
"""A category's value that occurs once."""
Tamper = Callable[[str, int, Parts, Parts], Parts | None]


def settings(folder: Path, sites: int = 3, **sections: dict[str, Any]) -> Settings:
    """Blobs at a few sites, an MLP, three rounds, under ``blind``."""
    raw: dict[str, Any] = {
        "data": {
            "name": "blobs", "clients": sites, "n_max": 60 * sites, "n_classes": 4, "n_features": 6, "spread": 2.0,
            "validation": 0.2, "seed": 3,
        },
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"batch_size": 32, "lr": 0.1},
        "run": {"rounds": 3, "seed": 3, "folder": str(folder / "runs")},
        "deploy": {"timeout": 30.0, "trust": "blind"},
    }  # fmt: skip
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return check_config(raw)


class Wires(InProcess):
    """An in-process transport with a record of all messages, whose ``tamper`` may change or drop replies, and whose
    ``forge`` may change questions."""

    def __init__(self, sites: dict[int, Site]) -> None:
        super().__init__({k: site.handle for k, site in sites.items()})
        self.said: list[tuple[str, int, Parts, Parts]] = []
        self.tamper: Tamper = lambda phase, k, asked, reply: reply
        self.forge: Callable[[str, int, Parts], Parts] = lambda phase, k, asked: asked

    def exchange(self, phase: str, payloads: Any, timeout: float | None, take: Take) -> Errors:
        errors: Errors = {}
        for k, parts in payloads.items():
            asked = self.forge(phase, k, dict(parts))
            reply = self.tamper(phase, k, asked, self._ask(k, phase, asked))
            self.said.append((phase, k, asked, reply or {}))
            if reply is None:
                errors[k] = "the site disconnected"
            else:
                take(k, reply)
        return errors


def make_folders(root: Path, names: list[str]) -> None:
    """A key for each site, and the list of all of them in each folder."""
    for name in names:
        (root / name).mkdir(parents=True)
        make_site_key(root / name, name)
    listed = "".join((root / name / "site.pub").read_text() for name in names)
    for name in names:
        (root / name / "sites.pub").write_text(listed)


def open_sites(
    root: Path, data: dict[int, SiteData] | Settings, policy: Policy | None = None
) -> tuple[list[str], dict[int, Site]]:
    """Sites with keys, by default with the parts of the settings' data set; the same again where the folders are there
    already."""
    if isinstance(data, Settings):
        pooled = load_pooled(data)
        whole = build_federation(data, pooled)
        data = {k: FederationSlice(whole, k, pooled.model, pooled.model_options) for k in range(whole.n_clients)}
    names = [f"site-{k}" for k in data]
    if not (root / names[0]).exists():
        make_folders(root, names)
    return names, {k: Site(names[k], one, policy or Policy(), root / names[k]) for k, one in data.items()}


def table_sites(root: Path, n: int = 3, rows: int = 90, **policy: Any) -> tuple[Settings, list[str], dict[int, Site]]:
    """Sites with tables of their own, one with a value that occurs once, and a config for them."""
    rng, data = np.random.default_rng(0), {}
    root.mkdir(exist_ok=True)
    for k in range(n):
        y = rng.random(rows) < 0.3
        frame = pd.DataFrame(
            {
                "age": 40 + 10 * y + rng.normal(0, 5, rows),
                "stamp": 1.7e9 + rng.normal(3600 * y, 600, rows),
                "ward": rng.choice(["a", "b", "c"], rows),
                "severe": np.where(y, "yes", "no"),
            }
        )
        frame.loc[3, "age"] = np.nan
        if not k:
            frame.loc[0, "ward"] = RARE
            schema, _ = propose_schema(write(frame, root / "0.csv"), "severe")
            (root / "schema.toml").write_text(schema_text(schema))
        data[k] = TableSite(write(frame, root / f"{k}.csv"), root / "schema.toml")
    config = settings(root, n)
    config = check_config(
        {**config.model_dump(exclude={"data"}), "data": {"name": "sites", "schema": str(root / "schema.toml")}}
    )
    names, sites = open_sites(root / "sites", dict(data), Policy(**policy))
    return config, names, sites


def write(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path, index=False)
    return path
