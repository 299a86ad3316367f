"""The deployment folder: keys, certificates, configuration; and the processes that belong to one."""

from __future__ import annotations

import datetime
import os
import shutil
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography", reason="deployments need fedtail[flower] or fedtail[nvflare]")

from fedtail.cli import app
from fedtail.core.errors import FedtailError
from fedtail.deploy import processes
from fedtail.deploy.certificates import inspect_certificate, key_matches, make_ca, make_server_certificate
from fedtail.deploy.create import create_deployment
from fedtail.deploy.layout import load_deployment
from fedtail.engines.flower.site_app import frames, worker_client
from fedtail.engines.wire import Parcel, pack, unpack

from .conftest import settings

SITES = ("north", "east", "south")


def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    keys = [*tmp_path.rglob("*.key")]
    assert len(keys) == 5
    assert all(stat.S_IMODE(k.stat().st_mode) == 0o600 for k in keys)
    assert all(key_matches(deployment.site(name)) for name in SITES)


def test_a_site_folder_holds_no_secret_of_the_server_or_of_another_site(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    secrets = {k.read_bytes() for k in deployment.server.glob("*.key")}
    mine = [{p.read_bytes() for p in deployment.site(name).rglob("*") if p.is_file()} for name in SITES]
    assert not any(secrets & files for files in mine)
    keys = [(deployment.site(name) / "site.key").read_bytes() for name in SITES]
    assert [sum(key in files for files in mine) for key in keys] == [1, 1, 1]


def test_the_server_certificate_is_for_the_public_address_and_signed_by_the_ca(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings(), public="fed.example.org:443")
    seen = inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt")
    assert seen.signed_by_ca and {"fed.example.org", "127.0.0.1", "localhost"} <= set(seen.hosts)
    assert seen.begins < datetime.datetime.now(datetime.UTC) < seen.ends
    other = tmp_path / "other"
    other.mkdir()
    make_ca(other, "other")
    assert not inspect_certificate(deployment.server / "server.crt", other / "ca.crt").signed_by_ca
    make_server_certificate(deployment.server, ["new.example.org"])
    assert (
        "new.example.org" in inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt").hosts
    )


def test_the_proxy_is_generated_for_the_public_port_and_the_fleet_path_only(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings(), public="fed.example.org:443", port=9300)
    text = (deployment.server / "nginx.conf").read_text()
    assert "listen 443 ssl;" in text and "proxy_pass https://127.0.0.1:9300;" in text
    assert text.count("location") == 2 and "location /v1/fleet/" in text and "location / { return 403; }" in text
    unit = (deployment.site("north") / "fedtail-site.service").read_text()
    assert "--superlink fed.example.org:443" in unit and "KillMode=control-group" in unit
    assert "--host 127.0.0.1 --port 9300" in (deployment.server / "fedtail-superlink.service").read_text()


def test_a_deployment_comes_back_from_its_folder(tmp_path: Path) -> None:
    made = create_deployment(tmp_path / "fed", SITES, settings(), public="h.example:8443", port=9300)
    assert load_deployment(tmp_path / "fed") == made
    assert tomllib.loads(made.config.read_text())["run"]["folder"] == str(made.runs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "{full}", "--sites", "a,b"], "exists and is not empty"),
        (["init", "{new}"], "at least one site"),
        (["init", "{new}", "--sites", "a,a"], "must differ"),
        (["init", "{new}", "--sites", "a/b"], "is not allowed"),
        (["init", "{new}", "--sites", "a,b", "--public", "nowhere"], "host:port"),
        (["status", "{new}"], "is not a deployment folder"),
        (["doctor"], "give the deployment folder"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    words = [a.format(full=tmp_path / "full", new=tmp_path / "new") for a in arguments]
    result = CliRunner().invoke(app, ["deploy", *words])
    assert isinstance(result.exception, FedtailError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_init_writes_a_folder_and_a_sites_doctor_reads_its_data(tmp_path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(app, ["deploy", "init", str(tmp_path / "fed"), "--sites", "a,b", "data.name=blobs"])
    assert made.exit_code == 0, made.output
    site = tmp_path / "fed" / "sites" / "a"
    healthy = runner.invoke(app, ["deploy", "doctor", "--site", str(site / "site.toml")])
    assert healthy.exit_code == 0 and "data: slice" in healthy.output
    (site / "site.key").chmod(0o644)
    broken = runner.invoke(app, ["deploy", "doctor", "--site", str(site / "site.toml")])
    assert broken.exit_code == 1 and "chmod 600" in broken.output


def test_stop_ends_all_marked_processes_and_no_other(tmp_path: Path) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    sleep = [sys.executable, "-c", f"import subprocess, sys; subprocess.run({child}, start_new_session=True)"]
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        processes.start(folder, "site:x", sleep, folder / "log", dict(os.environ))
    deadline = time.monotonic() + 20
    while len(processes.find(mine)) < 2 or len(processes.find(other)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert {p.role for p in processes.find(mine)} == {"site:x"}
    assert processes.stop(mine, grace=2.0) == 2
    assert processes.find(mine) == [] and len(processes.find(other)) == 2
    processes.stop(other, grace=2.0)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_stop_finds_the_proxy_although_it_hides_its_environment(tmp_path: Path) -> None:
    from fedtail.deploy import local

    deployment = create_deployment(tmp_path / "fed", SITES, settings(), port=local.free_port())
    local.start_proxy(deployment)
    assert [p.role for p in processes.find(deployment.folder)] == ["proxy"]
    processes.stop(deployment.folder)
    assert local.is_free("127.0.0.1", deployment.proxy_port)


def test_the_site_app_imports_neither_torch_nor_fedtail() -> None:
    """Flower starts it for every message; what it imports is paid each time."""
    folder = Path(frames.__file__).parents[1]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import site_app.worker_client, site_app.frames\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'fedtail', 'numpy')]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_worker_is_started_on_demand_reused_replaced_when_killed_and_ends_when_told(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", SITES, settings())
    site = deployment.site("north") / "site.toml"
    hello = pack(Parcel({}))
    pid = site.parent / "worker.pid"
    try:
        first = unpack(worker_client.ask(site, "hello", hello)).meta
        assert first["site"] == "north" and first["schema"]["kind"] == "slice"
        one = int(pid.read_text())
        worker_client.ask(site, "hello", hello)
        assert int(pid.read_text()) == one, "the same worker answers"
        os.kill(one, 9)
        assert unpack(worker_client.ask(site, "hello", hello)).meta["site"] == "north"
        assert int(pid.read_text()) != one
        assert "phase 'nonsense' is unknown" in unpack(worker_client.ask(site, "nonsense", hello)).meta["error"]
    finally:
        os.kill(int(pid.read_text()), 15)
    deadline = time.monotonic() + 10
    while pid.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not frames.socket_path(site).exists()


def test_a_worker_that_grew_too_large_is_replaced_after_its_answer(tmp_path: Path) -> None:
    site = create_deployment(tmp_path / "fed", SITES, settings()).site("north") / "site.toml"
    site.write_text(site.read_text().replace("memory_mb = 4096", "memory_mb = 256"))
    assert unpack(worker_client.ask(site, "hello", pack(Parcel({})))).meta["site"] == "north"
    deadline = time.monotonic() + 10
    while frames.socket_path(site).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "more than worker.memory_mb = 256" in (site.parent / "worker.log").read_text()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[site]\nname = "x"\n[data]\nkind = "tabel"\n')
    with pytest.raises(worker_client.WorkerError, match=r"did you mean 'table'"):
        worker_client.ask(site, "hello", pack(Parcel({})))
