"""The light side of a worker: its log does not grow without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtail.federate.site import worker_client


def test_a_log_that_grew_too_long_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LOG_BYTES", 10)
    log = tmp_path / "worker.log"
    worker_client.rotate(log)
    log.write_text("short")
    worker_client.rotate(log)
    assert log.read_text() == "short"
    log.write_text("longer than ten bytes")
    worker_client.rotate(log)
    assert not log.exists() and (tmp_path / "worker.log.1").read_text() == "longer than ten bytes"
