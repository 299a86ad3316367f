"""A worker and its light side: a log does not grow without end, and a full disk is answered."""

from __future__ import annotations

import errno
import os
import signal
import socket
from pathlib import Path

from fedtail.federate.protocol.faults import CODES
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import with_phase
from fedtail.federate.protocol.wire import Parcel, pack, unpack
from fedtail.federate.site import frames, worker, worker_client
from fedtail.federate.site.prepared import FederationSlice
from fedtail.federate.site.site import Site, code_of
from fedtail.runs.build import build_federation
from tests.federate.conftest import full_disk, settings


def test_a_log_that_grew_too_long_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    worker_client.rotate(log, 10)
    log.write_text("short")
    worker_client.rotate(log, 10)
    assert log.read_text() == "short"
    log.write_text("longer than ten bytes")
    worker_client.rotate(log, 10)
    assert not log.exists() and (tmp_path / "worker.log.1").read_text() == "longer than ten bytes"


def test_a_site_whose_disk_is_full_answers_so_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    data = FederationSlice(build_federation(settings()), 0, "mlp", {"hidden": [8]})
    site = Site("north", data, Policy(), tmp_path)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with full_disk():
            worker.answer(site, "hello", pack(Parcel({})), theirs)
            worker.log("nobody can read this")
        assert unpack(frames.receive(ours)).meta["site"] == "north", "a log that cannot be written delays nothing"
    assert code_of(OSError(errno.ENOSPC, "No space left on device")) == "disk"
    assert "disk is full" in CODES["disk"]
    assert unpack(site.handle("hello", pack(Parcel({})))).meta["site"] == "north"
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 1


def test_a_worker_that_is_alive_begins_no_run_with_a_list_of_sites_from_before(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings().to_toml())
    site = '[site]\nname = "north"\n[data]\nkind = "slice"\nconfig = "config.toml"\nclient = 0\n'
    (tmp_path / "site.toml").write_text(site)

    def ask(phase: str) -> str:
        reply = worker_client.ask(tmp_path / "site.toml", with_phase(phase, pack(Parcel({"document": {}}))))
        assert unpack(reply).meta["error"] == "agreement"
        return (tmp_path / "worker.pid").read_text()

    began = ask("offer")
    try:
        assert ask("offer") == began
        (tmp_path / "sites.pub").write_text("")
        assert ask("reveal") == began, "in the middle of a run nothing changes"
        began = ask("offer")
        assert ask("offer") == began and len((tmp_path / "worker.log").read_text().split("data changed")) == 2
    finally:
        os.kill(int(began), signal.SIGTERM)
