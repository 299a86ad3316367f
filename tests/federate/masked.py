"""Sites with keys and lists of each other, in this process: what tests of masked sums need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtail.data import DATASETS, Federation, partition
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.handshake import say_hello
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Errors, InProcess, Take
from fedtail.federate.protocol.wire import Parts
from fedtail.federate.site.data import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.federate.sums import Sums
from fedtail.settings import Settings

create_deployment = pytest.importorskip("fedtail.federate.operate.create", reason="keys").create_deployment
certificates = pytest.importorskip("fedtail.federate.operate.certificates", reason="keys need cryptography")

SETTINGS = Settings.of(epochs=1, batch_size=32, seed=3, path="reference")


def blobs(clients: int) -> Federation:
    pooled = DATASETS.build("blobs", n_max=60 * clients, n_features=6, n_classes=4, spread=2.0)
    return partition(pooled.train, pooled.test, clients=clients, classes=pooled.classes, transform=pooled.transform)


def job_for(federation: Federation, method: str = "fedcgnm", **more: Any) -> Job:
    return Job(
        run="test",
        model="mlp",
        input_shape=federation.input_shape,
        classes=federation.classes,
        method=method,
        rounds=3,
        model_options={"hidden": (8,)},
        local=SETTINGS.local,
        seed=3,
        transform=federation.transform,
        **more,
    )


def make_folders(root: Path, names: list[str]) -> None:
    """A key for each site, and the list of all of them in each folder."""
    for name in names:
        (root / name).mkdir(parents=True)
        certificates.make_site_key(root / name, name)
    listed = "".join((root / name / "site.pub").read_text() for name in names)
    for name in names:
        (root / name / "sites.pub").write_text(listed)


class Wires(InProcess):
    """An in-process transport with a record of all messages, whose ``tamper`` may change or drop them."""

    def __init__(self, sites: dict[int, Site]) -> None:
        super().__init__({k: site.handle for k, site in sites.items()})
        self.said: list[tuple[str, int, Parts, Parts]] = []
        self.tamper: Callable[[str, int, Parts, Parts], Parts | None] = lambda phase, k, asked, reply: reply

    def exchange(self, phase: str, payloads: Any, timeout: float | None, take: Take) -> Errors:
        errors: Errors = {}
        for k, parts in payloads.items():
            reply = self.tamper(phase, k, dict(parts), self._ask(k, phase, dict(parts)))
            self.said.append((phase, k, dict(parts), reply or {}))
            if reply is None:
                errors[k] = "the site disconnected"
            else:
                take(k, reply)
        return errors


def masked_engine(
    root: Path, federation: Federation, *, policy: Policy | None = None, **more: Any
) -> tuple[RemoteEngine, dict[int, Site], Wires]:
    """An engine whose sites have said hello to a job with masks."""
    names = [f"site-{k:02d}" for k in range(federation.n_clients)]
    make_folders(root, names)
    policy = policy or Policy()
    sites = {k: Site(name, FederationSlice(federation, k), policy, root / name) for k, name in enumerate(names)}
    wires = Wires(sites)
    job = job_for(federation, **{"reveal": "sums", **more.pop("job", {})})
    hellos, missing = say_hello(wires, range(len(names)), 10.0, job)
    assert not missing
    engine = RemoteEngine(
        transport=wires,
        job=job,
        sizes=np.array([hellos[k].n_train for k in range(len(names))]),
        sums=Sums.of(hellos, names),
        **more,
    )
    return engine, sites, wires
