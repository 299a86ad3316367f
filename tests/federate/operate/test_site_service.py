"""The site service: a SuperNode that ends or hangs is started again, and the operator can read why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.federate.operate import certificates, local, processes, service
from fedtail.federate.operate.control import Control, wait_until_healthy
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.processes import free_port
from fedtail.federate.operate.service import SiteService
from tests.federate.conftest import full_disk, settings
from tests.federate.gate import Gate
from tests.waiting import HANGS, until


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2})).site("north")


def hurry(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Have services look often, start again at once, and lose patience after so many seconds."""
    for name, value in {"look": 0.05, "pauses": (0.05,), **seconds}.items():
        monkeypatch.setattr(SiteService, name, value)


def serve(service: SiteService) -> threading.Thread:
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("file", "said"),
    [("site.key", "fedtail site keys"), ("site.pub", "--new"), ("ca.crt", "ask the server's operator")],
)
def test_a_service_without_a_key_does_not_start_a_client_that_ends_again_and_again(
    site: Path, file: str, said: str
) -> None:
    (site / file).unlink()
    with pytest.raises(FedtailError, match=f"{file}.* is missing; .*{said}"):
        SiteService(site)


def test_a_server_that_cannot_be_reached_is_waited_for_and_one_that_can_for_a_while_only(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour without a server is no reason to restart anything; then it can be reached, and does not answer."""
    now, states = [1000.0], []
    faults = ["refused"] * 900 + [""] * 3 + ["refused"] + [""] * 100
    left = iter(faults)
    monkeypatch.setattr(service.time, "time", lambda: now[0])
    monkeypatch.setattr(service, "tls_fault", lambda *_: next(left))
    running = SiteService(site)

    def look(seconds: float) -> bool:
        now[0] += seconds
        states.append(running.health.state)
        return False

    monkeypatch.setattr(running.stopping, "wait", look)
    running.health.started = 1000.0
    with subprocess.Popen(["sleep", "3600"]) as process:
        said = running.watch(process)
        process.kill()
    assert "although the server is reachable" in said
    assert states[10] == "starting" and states[100] == "server unreachable" and states[-1] == "no contact"
    assert len(faults) - len(list(left)) == 900 + 3 + 1 + 16, "counted anew when it could not be reached"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit(3)", "exited with code 3; find out why: fedtail deploy doctor --site "),
        ("import time; time.sleep(3600)", "although the server is reachable; restarting it"),
    ],
)
def test_a_supernode_that_ends_or_hangs_is_started_again(
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    script: str,
    said: str,
) -> None:
    (tmp_path / "stub.py").write_text(script)
    monkeypatch.setattr(processes, "SUPERNODE", tmp_path / "stub.py")
    monkeypatch.setattr(service, "tls_fault", lambda *_: "")
    hurry(monkeypatch, stale=0.1, grace=0.1)
    running = SiteService(site)
    thread = serve(running)
    try:
        until(lambda: running.health.restarts >= 2, "two restarts")
        with pytest.raises(FedtailError, match="another service"):
            SiteService(site).run()
    finally:
        running.stop()
        thread.join(HANGS)
    lines = capfd.readouterr().out
    assert said in lines and "service stopped" in lines
    assert json.loads((site / "health.json").read_text())["state"] == "stopped"


def test_a_service_bears_a_full_disk(site: Path) -> None:
    service = SiteService(site)
    with full_disk():
        service.tell("connected", "")
    assert service.health.state == "connected" and not (site / "health.json").exists()


def test_health_says_what_is_wrong_and_how_to_start(site: Path) -> None:
    found = CliRunner().invoke(app, ["site", "health", str(site)])
    assert found.exit_code == 1 and f"north: down: start it with: fedtail site run {site}" in found.output
    for other in ('{"uptime": 3}', "{"):  # of another version, or cut off
        (site / "health.json").write_text(other)
        assert CliRunner().invoke(app, ["site", "health", str(site)]).output == found.output
    (site / "site.toml").write_text((site / "site.toml").read_text().replace("server =", "# server ="))
    with pytest.raises(FedtailError, match=r"\[site\] has no server"):
        SiteService(site)


def test_the_service_is_light(site: Path) -> None:
    """It stays for months beside the worker that trains."""
    line = "import sys; import fedtail.cli.site, fedtail.federate.operate.service as s; s.SiteService(s.Path({!r}))"
    heavy = "print([m for m in ('torch', 'flwr', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{line.format(str(site))}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_site_file_that_the_worker_would_refuse_is_refused_at_the_start(site: Path) -> None:
    (site / "site.toml").write_text((site / "site.toml").read_text().replace("[policy]", "[policy]\nmetods = 1"))
    with pytest.raises(FedtailError, match="metods"):
        SiteService(site)


class Served:
    """A SuperLink, and one site whose service reaches it through a gate, as real processes. Ended as a context."""

    def __init__(self, folder: Path) -> None:
        settled = settings(data={"clients": 2})
        self.deployment = create_deployment(folder, ("north", "south"), settled, port=free_port())
        self.site = self.deployment.site("north")
        self.gate = Gate(self.deployment.port)

    def __enter__(self) -> Served:
        local.start_superlink(self.deployment)
        command = [sys.executable, "-m", "fedtail", "site", "run", str(self.site), "--server", self.gate.address]
        with (self.site / "site.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", processes.MARK: str(self.deployment.folder)}
            self.service = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        wait_until_healthy(self.deployment, HANGS, self.deployment.server / "superlink.log")
        with Control(self.deployment) as control:
            control.register()
        until(self.online, "the site")
        until(lambda: CliRunner().invoke(app, ["site", "health", str(self.site)]).exit_code == 0, "a healthy site")
        return self

    def __exit__(self, *reason: object) -> None:
        self.service.send_signal(signal.SIGTERM)
        try:
            assert self.service.wait(HANGS) == 0
        finally:
            self.service.kill()
            local.down(self.deployment)

    def online(self) -> bool:
        with Control(self.deployment) as control:
            return control.nodes()["north"] == "online"

    def health(self) -> dict[str, Any]:
        return dict(json.loads((self.site / "health.json").read_text()))

    def end_server(self) -> None:
        processes.stop(self.deployment.folder, "superlink")

    def start_server(self) -> None:
        local.start_superlink(self.deployment)


@pytest.mark.flower
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_a_site_comes_back_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From twelve seconds of closed handshakes, a server that was away, one whose certificate has expired and is
    renewed, and a day of which the site knows nothing (a machine that slept)."""
    with Served(tmp_path / "fed") as fed:
        server = fed.deployment.server

        before = fed.health()["pid"]
        fed.gate.shut()
        time.sleep(12)
        fed.gate.open = True
        until(lambda: not fed.online(), "Flower to notice")
        until(fed.online, "the site to come back after closed handshakes")
        assert fed.health()["pid"] != before, "another SuperNode"
        assert "restarting it" in (fed.site / "site.log").read_text()

        fed.end_server()
        monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
        certificates.make_server_certificate(server, ["127.0.0.1", "localhost"])
        time.sleep(2)  # it is valid until now
        monkeypatch.undo()
        fed.start_server()
        until(lambda: "expired" in (fed.site / "site.log").read_text(), "the site to say why")
        fed.end_server()
        assert certificates.renew_certificate(fed.deployment)
        fed.start_server()
        wait_until_healthy(fed.deployment, HANGS, server / "superlink.log")
        until(fed.online, "the site to come back after a renewed certificate and restarts of the server")

        stopped = [p.pid for p in processes.find(fed.deployment.folder) if p.role != "superlink"]
        for pid in stopped:
            processes.send_signal(pid, signal.SIGSTOP)
        until(lambda: not fed.online(), "Flower to take it for gone")
        yesterday = time.time() - 86400
        os.utime(fed.site / "contact", (yesterday, yesterday))
        for pid in stopped:
            processes.send_signal(pid, signal.SIGCONT)
        until(fed.online, "the site to come back after a day")
        until(lambda: fed.health()["state"] == "connected", "a healthy site")
