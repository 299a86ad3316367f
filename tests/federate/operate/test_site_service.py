"""The site service: a SuperNode that ends or hangs is started again, and the operator can read why."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.federate.flower import supernode
from fedtail.federate.operate import local, site_service
from fedtail.federate.operate.control import Control, wait_until_healthy
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.ports import free_port
from fedtail.federate.operate.site_service import SiteService, Watchdog
from tests.federate.conftest import settings


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2})).site("north")


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


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
        ("print('\\x1b[92mINFO\\x1b[0m :      no such key'); raise SystemExit(3)", "ended with code 3: no such key"),
        ("import time; time.sleep(60)", "although the server can be reached; starting it again"),
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
        until(lambda: service.health.restarts >= 2, 30, "two restarts")
        with pytest.raises(FedtailError, match="another service"):
            SiteService(site).run()
    finally:
        service.stop()
        thread.join(30)
    lines = (site / "site.log").read_text()
    assert said in lines and "service stopped" in lines and "\x1b" not in lines
    assert json.loads((site / "health.json").read_text())["state"] == "stopped"


def test_health_says_what_is_wrong_and_how_to_start(site: Path) -> None:
    found = CliRunner().invoke(app, ["site", "health", str(site)])
    assert found.exit_code == 1 and f"north: down: start it with: fedtail site run {site}" in found.output
    (site / "site.toml").write_text((site / "site.toml").read_text().replace("server =", "# server ="))
    with pytest.raises(FedtailError, match=r"\[site\] has no server"):
        SiteService(site)


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
            inside = socket.create_connection(("127.0.0.1", self.port))
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


@pytest.mark.flower
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_a_site_comes_back_by_itself_after_twelve_seconds_of_closed_handshakes(tmp_path: Path) -> None:
    deployment = create_deployment(
        tmp_path / "fed", ("north", "south"), settings(data={"clients": 2}), port=free_port()
    )
    site = deployment.site("north")
    gate = Gate(deployment.port)
    local.start_superlink(deployment)
    command = [sys.executable, "-m", "fedtail", "site", "run", str(site), "--server", gate.address]
    with (site / "service.log").open("wb") as log:
        service = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def online() -> bool:
        with Control(deployment) as control:
            return control.nodes()[0].status == "online"

    def pid() -> int:
        return int(json.loads((site / "health.json").read_text())["pid"])

    try:
        wait_until_healthy(deployment, 90, deployment.server / "superlink.log")
        with Control(deployment) as control:
            control.register("north")
        until(online, 120, "the site")
        until(lambda: CliRunner().invoke(app, ["site", "health", str(site)]).exit_code == 0, 30, "a healthy site")
        before = pid()
        gate.shut()
        time.sleep(12)
        gate.open = True
        until(lambda: not online(), 90, "Flower to notice")
        until(online, 180, "the site to come back")
        assert pid() != before, "another SuperNode"
        assert "starting it again" in (site / "site.log").read_text()
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            assert service.wait(30) == 0
        finally:
            service.kill()
            local.down(deployment)
