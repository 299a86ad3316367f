"""A site's method state follows the server, also backwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedtail.federate.protocol.job import job_of
from fedtail.federate.site.prepared import FederationSlice, SiteState, prepare
from fedtail.runs.build import build_federation
from tests.federate.conftest import settings


@pytest.mark.parametrize("run", ["..", ".", "../other", "x/../.."])
def test_a_run_of_any_name_keeps_its_state_in_a_folder_of_its_own(tmp_path: Path, run: str) -> None:
    config = settings()
    data = FederationSlice(build_federation(config), 0, "mlp", {"hidden": [8]})
    job = replace(job_of(config, data.schema(), "any", "flower"), run=run)
    folder = prepare(data, job, 0, tmp_path, torch.device("cpu")).state.folder
    assert folder.resolve().parent == (tmp_path / "state").resolve()


def value(state: dict[str, torch.Tensor]) -> float | None:
    return float(state["v"]) if state else None


def test_a_resumed_server_finds_the_state_of_the_round_it_repeats(tmp_path: Path) -> None:
    store = SiteState(tmp_path / "run")
    for t in range(4):
        store.hold(t, [{"v": torch.tensor(10.0 * t)}, {"v": torch.tensor(10.0 * t + 1)}])
        store.commit(t, 1)
        store.commit(t, 1)
    store = SiteState(tmp_path / "run")
    assert value(store.before(4)) == 31.0
    assert value(store.before(2)) == 11.0
    assert value(store.before(4)) == 11.0, "states after the repeated round are forgotten"


def test_a_round_that_was_missed_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    store = SiteState(tmp_path)
    assert store.before(0) == {}
    store.hold(0, [{"v": torch.tensor(1.0)}])
    store.commit(0, 0)
    store.hold(1, [{"v": torch.tensor(2.0)}])
    assert value(store.before(2)) == 1.0, "round 1 was never committed"
