"""What a server tries by what sites are asked to sign: settings that leave one site alone in a sum, that import code,
or that take the noise away; docs/threat-model.md refers to these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedtail.core.records import DIVERGED, Task
from fedtail.core.totals import LIMIT
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.federate import agreed, relay
from fedtail.federate.exchanges import Journal
from fedtail.federate.protocol import agreement
from fedtail.federate.protocol.job import job_of, method_of
from fedtail.federate.protocol.masks import PRIME, as_check, share_of_noise
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.member import SiteTotals, SumError
from fedtail.federate.site.own import ImageSite, TableSite
from fedtail.federate.site.prepared import FederationSlice, prepare
from fedtail.federate.summed import SummedEngine
from fedtail.runs.config import changed, check_config
from tests.totals import LocalTotals

from .loopback import Wires, make_folders, open_sites, settings, table_sites, write
from .test_blind import agreed_parties

NAMES = ["site-0", "site-1", "site-2"]


# -- one site alone in a sum ------------------------------------------------------------------------------------------


def engine_of(tmp_path: Path, sizes: tuple[int, ...] = (12, 90, 100)) -> SummedEngine:
    """Three sites, of which the first has one batch, and all others several."""
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 5)).astype(np.float32), np.arange(n) % 3) for n in sizes]
    federation = Federation.from_arrays(parts, parts[0], validation=0.0)
    config = check_config(
        {"method": {"name": "fedavg"}, "local": {"batch_size": 16}, "deploy": {"trust": "blind"},
         "model": {"name": "mlp", "hidden": [4]}}
    )  # fmt: skip
    data = {k: FederationSlice(federation, k) for k in range(3)}
    job = job_of(config, data[0].schema(), "run", "")
    owned = {k: prepare(one, job, k, tmp_path, torch.device("cpu")) for k, one in data.items()}
    totals, size = LocalTotals(3), np.array([float(sum(sizes))])
    return SummedEngine(totals, owned, owned[0].model, method_of(config), config, 3, size, "test")


def task_of(engine: SummedEngine, *rates: float) -> Task:
    x = engine.owned[0].job.build_model(1)
    start = torch.cat([p.detach().ravel() for p in x.parameters()])
    lr = np.tile(rates, (3, 1))
    racing = frozenset({DIVERGED}) if len(rates) > 1 else frozenset[str]()
    return Task(0, start, (0, 1, 2), {"rate": np.zeros_like(lr), "lr": lr}, rates[0], reports=racing)


def test_a_learning_rate_that_all_but_one_site_diverge_at_has_no_sum(tmp_path: Path) -> None:
    """With 10^30 whoever has one batch ends at a finite model, and others' losses overflow: were theirs left out, the
    sum would be that site's own gradient."""
    engine = engine_of(tmp_path)
    with pytest.raises(FedtailError, match="no sum can hold"):
        engine.train(task_of(engine, 1e30))


def test_in_a_race_a_learning_rate_that_is_lost_at_one_site_is_lost_at_all(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ((update,), _) = engine.train(task_of(engine, 0.1, 1e30))
    assert update.reports[DIVERGED].tolist() == [0.0, 1.0]
    assert update.delta[0].norm() > 0.01 and not update.delta[1].any(), "not the update of the one site that is left"
    with pytest.raises(FedtailError, match="diverges at every learning rate"):
        engine.train(task_of(engine, 1e30, 1e31))


def test_sites_are_not_told_apart_by_updates_that_are_cut(tmp_path: Path) -> None:
    """One batch each, and a learning rate at which all updates exceed the fixed point: cut to +-16 and weighed by
    sites' sizes, a sum of signs says the sign at each site."""
    engine = engine_of(tmp_path, (12, 14, 16))
    with pytest.raises(FedtailError, match="no sum can hold"):
        engine.train(task_of(engine, 1e30))


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "key", "many"), [("run", "diagnostics", True), ("run", "metric", False)])
def test_nothing_in_a_document_is_imported(tmp_path: Path, section: str, key: str, many: bool) -> None:
    config, names, sites = table_sites(tmp_path)
    ran, code = tmp_path / "ran", tmp_path / "code.py"
    code.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef anything(*_): pass\n")
    document = agreed.write_document(config, agreed.declared_schema(config), names, "run")
    name = f"{code}:anything"
    document["settings"][section][key] = [name] if many else name
    reply = unpack(sites[0].handle(Phase.OFFER, pack(Parcel({"document": json.loads(json.dumps(document))}))))
    assert reply.meta == {"error": "policy-code"} and not ran.exists()
