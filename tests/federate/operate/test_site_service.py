"""The site service: a SuperNode that ends or hangs is started again, and the operator can read why."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
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
from fedtail.federate.flower import supernode
from fedtail.federate.operate import certificates, local, membership, processes, site_clients, site_service
from fedtail.federate.operate.commands import free_port
from fedtail.federate.operate.control import Control, wait_until_healthy
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.site_clients import FlowerClient
from fedtail.federate.operate.site_service import SiteService, Watchdog
from fedtail.federate.site import worker_client
from tests.federate.conftest import full_disk, settings
from tests.waiting import HANGS, until


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2})).site("north")


def test_a_supernode_is_useless_only_where_the_server_can_be_reached_for_a_while() -> None:
    now = 0.0
    dog = Watchdog(stale=60.0, grace=30.0, clock=lambda: now)
    down, up = (lambda: "refused"), (lambda: "")
    assert dog.judge(10.0, down)[0] == "connected"
    assert dog.judge(86400.0, down) == ("server unreachable", "refused"), "a day without a server: left alone"
    assert dog.judge(86400.0, up)[0] == "no contact"
    now = 20.0
    assert dog.judge(86420.0, up)[0] == "no contact", "it may find the server itself"
    assert dog.judge(86420.0, down)[0] == "server unreachable"
    now = 40.0
    assert dog.judge(86440.0, up)[0] == "no contact", "counted anew"
    now = 70.0
    assert dog.judge(86470.0, up)[0] == "useless"
    assert dog.judge(1.0, up)[0] == "connected"


def serve(service: SiteService) -> threading.Thread:
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('\\x1b[92mINFO\\x1b[0m :      no such key'); raise SystemExit(3)", "exited with code 3: no such key"),
        ("import time; time.sleep(3600)", "although the server is reachable; restarting it"),
    ],
)
def test_a_supernode_that_ends_or_hangs_is_started_again(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    (tmp_path / "stub.py").write_text(script)
    monkeypatch.setattr(supernode, "__file__", str(tmp_path / "stub.py"))
    monkeypatch.setattr(site_service, "tls_fault", lambda *_: "")
    service = SiteService(site, stale=0.1, grace=0.1, look=0.05, pauses=(0.05,))
    thread = serve(service)
    try:
        until(lambda: service.health.restarts >= 2, "two restarts")
        with pytest.raises(FedtailError, match="another service"):
            SiteService(site).run()
    finally:
        service.stop()
        thread.join(HANGS)
    lines = (site / "site.log").read_text()
    assert said in lines and "service stopped" in lines and "\x1b" not in lines
    assert json.loads((site / "health.json").read_text())["state"] == "stopped"


def test_a_message_without_an_answer_is_noticed_where_nothing_works_on_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(site_clients.time, "time", lambda: now)
    client = FlowerClient(site, "fed.example.org:443")
    assert client.unanswered() == 0.0
    client.waiting.touch()
    os.utime(client.waiting, (now, now))
    now += 30
    assert client.unanswered() == 30.0
    with (site / worker_client.ASKING).open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as the app does while the worker trains, for hours if need be
        now += 7200
        assert client.unanswered() == 0.0
        monkeypatch.undo()
    now += 100
    monkeypatch.setattr(site_clients.time, "time", lambda: now)
    assert client.unanswered() == 100.0, "counted from when the work was done"
    client.waiting.unlink()
    assert client.unanswered() == 0.0


def test_a_supernode_whose_message_has_no_answer_is_started_again(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, pathlib, time; pathlib.Path(os.environ['FEDTAIL_WAITING']).touch(); time.sleep(3600)"
    (tmp_path / "stub.py").write_text(script)
    monkeypatch.setattr(supernode, "__file__", str(tmp_path / "stub.py"))
    service = SiteService(site, answer=0.2, look=0.05, pauses=(0.05,))
    thread = serve(service)
    try:
        until(lambda: service.health.restarts >= 1, "a restart")
    finally:
        service.stop()
        thread.join(HANGS)
    assert "a message has had no answer for" in (site / "site.log").read_text()


def test_a_service_bears_a_full_disk(site: Path) -> None:
    service = SiteService(site)
    with full_disk():
        service.tell("connected", "")
    assert service.health.state == "connected" and not (site / "health.json").exists()


def test_health_says_what_is_wrong_and_how_to_start(site: Path) -> None:
    found = CliRunner().invoke(app, ["site", "health", str(site)])
    assert found.exit_code == 1 and f"north: down: start it with: fedtail site run {site}" in found.output
    (site / "site.toml").write_text((site / "site.toml").read_text().replace("server =", "# server ="))
    with pytest.raises(FedtailError, match=r"\[site\] has no server"):
        SiteService(site)


def test_the_service_runs_nvflares_client_where_the_site_has_its_kit(site: Path) -> None:
    """The kit's own script, in the foreground; connected while it holds a connection to the server."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    kit = site / "kit" / "startup"
    kit.mkdir(parents=True)
    (kit / "fed_client.json").write_text(json.dumps({"servers": [{"service": {"target": f"127.0.0.1:{port}"}}]}))
    dial = f"import socket, time; s = socket.create_connection(('127.0.0.1', {port})); time.sleep(3600)"
    (kit / "sub_start.sh").write_text(f'[ "$1" = --once ] && exec {sys.executable} -c "{dial}"\n')
    toml = (site / "site.toml").read_text().replace("[site]", '[site]\nnvflare = "kit"')
    (site / "site.toml").write_text(toml)
    with pytest.raises(FedtailError, match="startup kit names the server"):
        SiteService(site, "elsewhere:1")
    service = SiteService(site, look=0.05)
    thread = serve(service)
    try:
        until(lambda: service.health.state == "connected", "the client's connection")
        assert service.health.server == f"127.0.0.1:{port}" and service.health.contact > service.health.started
    finally:
        service.stop()
        thread.join(HANGS)
        server.close()
    assert "NVFlare client started" in (site / "site.log").read_text()
    (kit / "fed_client.json").unlink()
    with pytest.raises(FedtailError, match="is not a startup kit"):
        SiteService(site)


def test_the_service_is_light(site: Path) -> None:
    """It stays for months beside the worker that trains."""
    line = (
        "import sys; import fedtail.cli.site, fedtail.federate.operate.site_service as s; s.SiteService(s.Path({!r}))"
    )
    heavy = "print([m for m in ('torch', 'flwr', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{line.format(str(site))}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_site_file_that_the_worker_would_refuse_is_refused_at_the_start(site: Path) -> None:
    (site / "site.toml").write_text((site / "site.toml").read_text().replace("[policy]", "[policy]\nmetods = 1"))
    with pytest.raises(FedtailError, match="metods"):
        SiteService(site).run()


class Gate:
    """Passes TCP connections on to a port, or closes each at once: a TLS handshake that is cut off."""

    def __init__(self, port: int) -> None:
        self.port, self.open = port, True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def shut(self) -> None:
        self.open = False
        for connection in self.pairs:
            connection.close()
        self.pairs.clear()

    def _accept(self) -> None:
        while True:
            outside, _ = self.listener.accept()
            if not self.open:
                outside.recv(1 << 16)  # closed with its hello unread, it would be reset, which Flower retries
                outside.close()
                continue
            try:
                inside = socket.create_connection(("127.0.0.1", self.port))
            except OSError:  # the server is away
                outside.close()
                continue
            self.pairs += [outside, inside]
            threading.Thread(target=self._pass_on, args=(outside, inside), daemon=True).start()

    def _pass_on(self, *ends: socket.socket) -> None:
        try:
            while True:
                for ready in select.select(ends, [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    ends[1 - ends.index(ready)].sendall(data)
        except (OSError, ValueError):
            return
        finally:
            for end in ends:
                end.close()


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
        with (self.site / "service.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", processes.MARK: str(self.deployment.folder)}
            self.service = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        wait_until_healthy(self.deployment, 90, self.deployment.server / "superlink.log")
        with Control(self.deployment) as control:
            control.register("north")
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
        assert membership.renew_certificate(fed.deployment)
        fed.start_server()
        wait_until_healthy(fed.deployment, 60, server / "superlink.log")
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
