"""What keeps a deployment going: what status advises, what a resumed run remembers."""

from __future__ import annotations

import datetime
import json
import re
from contextlib import nullcontext
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

import httpx

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.operate import control, runs
from fedtail.federate.operate.control import Control
from fedtail.federate.operate.create import LAST_CONFIG, create_deployment, write_config
from fedtail.federate.operate.doctor import advice, check_connection
from fedtail.federate.operate.processes import free_port
from fedtail.federate.status import Status
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


def test_a_run_over_tables_is_resumed_also_where_its_folder_was_moved(tmp_path: Path, monkeypatch) -> None:
    """The last run's config names files of the folder; as overrides of ``data.*`` they would be refused."""
    assert call("init", tmp_path / "fed", "--sites", "a,b,c", "--own-data")[0] == 0
    made = load_deployment(tmp_path / "fed")
    write_config(made, load_config(made.config, ["run.name=second"]))
    began: list[Any] = []
    monkeypatch.setattr(runs, "start", lambda where, config, *, resume: began.append(write_config(where, config)) or 1)
    for name in ("fed", "moved"):
        place = made.folder.rename(tmp_path / name) if name == "moved" else made.folder
        assert call("run", place, "--resume", "--detach")[0] == 0
        resumed = load_config(began.pop())
        assert (resumed.run.name, resumed.run.folder) == ("second", str(place / "runs"))
        assert resumed.data.options["schema"] == str(place / "schema.toml")
        assert call("run", place, "--resume", "--detach", "data.schema=other.toml")[0] == 2, "the sites' business"


def test_a_question_between_a_run_and_its_resumption_is_not_resumed_in_its_place(
    deployment: Deployment, monkeypatch
) -> None:
    last = write_config(deployment, load_config(deployment.config, ["run.name=second"])).read_text()
    asked: list[Any] = []
    flower = SimpleNamespace(start_run=lambda **given: asked.append(given) or 1, active=list)
    monkeypatch.setattr(runs, "Control", lambda deployment: nullcontext(flower))
    monkeypatch.setattr(runs, "write_question", lambda *_: {})
    monkeypatch.setattr(runs, "wait", lambda *_: {"counts": {}})
    monkeypatch.setattr(runs.Scores, "from_json", lambda told: told)
    runs.count(deployment, "evaluate", deployment.runs / "second")
    assert (deployment.server / LAST_CONFIG).read_text() == last and load_config(asked[0]["config"]).run.name is None


def test_a_question_that_nobody_waits_for_any_more_is_ended(deployment: Deployment, monkeypatch) -> None:
    """At the server it would wait for a site that is away, a day long, and no run could begin."""
    active, stopped = [5], list[int]()

    def begun(**_: object) -> int:
        active.append(6)
        return 6

    flower = SimpleNamespace(
        start_run=begun, active=lambda: list(active), stop_run=lambda run: active.remove(run) or not stopped.append(run)
    )
    monkeypatch.setattr(runs, "Control", lambda deployment: nullcontext(flower))
    monkeypatch.setattr(runs, "is_healthy", lambda deployment: True)
    monkeypatch.setattr(runs, "write_question", lambda *_: {})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "wait", interrupted)
    with pytest.raises(FedtailError, match="already active; stop it first with `fedtail deploy stop"):
        runs.count(deployment, "evaluate", deployment.runs / "second")
    Status(deployment.server / runs.RUN, settings(), 5).write(state="finished")
    with pytest.raises(KeyboardInterrupt):
        runs.count(deployment, "evaluate", deployment.runs / "second")
    assert 6 in stopped and not active and not runs.stop(deployment)
    active.append(7)
    assert runs.stop(deployment) and 7 in stopped


def test_machines_get_one_object_of_a_run_that_was_begun_and_of_what_doctor_finds(
    deployment: Deployment, monkeypatch
) -> None:
    monkeypatch.setattr(runs, "start", lambda *_, resume: 1 << 63)
    for words in (("run", deployment.folder, "--detach"), ("doctor", deployment.folder)):
        told = json.loads(call(*words, "--json")[1].splitlines()[-1])
        assert told.get("started", str(1 << 63)) == str(1 << 63)
        assert all({"level", "subject", "message"} <= set(each) for each in told.get("findings", []))


@pytest.mark.parametrize(("ahead", "said"), [(0, ""), (60, "60 s ahead of"), (-200, ""), (-3600, "3600 s behind")])
def test_a_clock_for_which_flower_refuses_a_site_is_named(deployment: Deployment, monkeypatch, ahead, said) -> None:
    """The server answers everybody over TLS, and this site's client would only end again and again."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ahead)
    answer = httpx.Response(403, headers={"date": format_datetime(then, usegmt=True)})
    monkeypatch.setattr(httpx.Client, "post", lambda *_, **__: answer)
    found = [f for f in check_connection("127.0.0.1:1", deployment.server / "ca.crt") if f.level != "ok"]
    assert [f.subject for f in found] == ["clock"] * bool(said) and all(said in f.message for f in found)


def test_a_certificate_that_nobody_believes_is_not_called_a_server_that_is_down(
    deployment: Deployment, monkeypatch
) -> None:
    fault = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired"
    monkeypatch.setattr(control, "tls_fault", lambda *_: fault)
    code, output = call("status", deployment.folder)
    assert code == 0 and "certificate has expired" in output and "fedtail deploy renew" in output
    assert "no SuperLink answers" not in output


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
        (
            {"run": {"state": "failed", "error": "x", "round": 3, "time": 0}},
            r"failed \(x\).*--resume, or start a new run",
        ),
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
