"""What keeps a deployment going: what status advises, what a resumed run remembers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate import runs
from fedtail.federate.operate.control import Control
from fedtail.federate.operate.create import LAST_CONFIG, create_deployment
from fedtail.federate.operate.doctor import advice
from fedtail.federate.operate.processes import free_port
from fedtail.runs.config import changed, load_config
from tests.federate.conftest import settings
from tests.federate.operate.test_membership import call

SITES = ("north", "east", "south")
WELL: dict[str, Any] = {"superlink": "up", "sites": dict.fromkeys(SITES, "online"), "run": {}}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return create_deployment(tmp_path / "fed", SITES, settings(), port=free_port())


def test_overrides_of_a_resumed_run_change_that_run_and_start_no_other(deployment: Deployment, monkeypatch) -> None:
    last = changed(load_config(deployment.config), {"run.name": "second", "local.lr": 0.05})
    (deployment.server / LAST_CONFIG).write_text(last.to_toml())
    started: list[Any] = []
    monkeypatch.setattr(runs, "start", lambda _, config, *, resume: started.append(config) or 1)
    call("run", str(deployment.folder), "deploy.timeout=45", "--resume", "--detach")
    (config,) = started
    assert config == changed(last, {"deploy.timeout": 45})


def test_where_all_is_well_there_is_nothing_to_do(deployment: Deployment) -> None:
    assert advice(deployment, WELL) == []


def test_a_run_that_ends_while_it_is_being_stopped_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FedtailError("Flower refused StopRun: run is already finished")

    said = iter(["running", "finished:completed", "running", "running"])
    monkeypatch.setattr(Control, "run_status", lambda self, run_id: (next(said), ""))
    monkeypatch.setattr(Control, "_call", refuse)
    control = Control.__new__(Control)
    assert not control.stop_run(7)
    with pytest.raises(FedtailError, match="refused"):
        control.stop_run(7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"superlink": "down"}, "no SuperLink answers at .*; start its unit"),
        ({"run": {"state": "failed", "error": "x", "round": 3, "time": 0}}, r"failed \(x\).*--resume"),
        ({"run": {"state": "stopped", "round": 3, "time": 0}}, "resume with: .*--resume"),
        ({"sites": {"north": "offline"}}, "north is offline: ask its operator for `fedtail site health`"),
        ({"sites": {"north": "registered"}}, "it has not connected yet; ask its operator to start"),
        ({"sites": {"north": "not registered"}}, "north is not registered: run `fedtail deploy register"),
        ({"sites": {"north": "without a key"}}, "fedtail deploy add .* north --key FILE"),
    ],
)
def test_status_names_what_an_operator_should_do(deployment: Deployment, change: dict[str, Any], said: str) -> None:
    (line,) = advice(deployment, {**WELL, **change})
    assert re.search(said, line), line
