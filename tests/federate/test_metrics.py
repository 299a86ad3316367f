"""What Prometheus reads of a run."""

from __future__ import annotations

import re
import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (pip install 'fedtail[metrics]')")

from fedtail.errors import FedtailError
from fedtail.federate.metrics import Metrics, served

RECORD: dict[str, Any] = {
    "round": 0,
    "clients": [0],
    "train_loss": 0.5,
    "refused": [{"client": 1, "reason": "late"}],
    "faults": [{"client": 1, "reason": "validate: late"}],
    "traffic": {"down": 100, "up": 50},
    "privacy": {"epsilon": 1.5},
}
LINE = re.compile(r'fedtail_\w+\{(\w+="(?:[^"\\]|\\.)*",)*run="[^"]*"(,\w+="(?:[^"\\]|\\.)*")*\} \S+')


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_scrape_tells_rounds_bytes_refusals_epsilon_and_who_was_seen() -> None:
    metrics = Metrics("run 1", ['no"rth', "south"], 10, {0: 1700000000.0})
    port = free()
    with served(metrics, port):
        url = f"http://127.0.0.1:{port}/metrics"
        assert 'fedtail_rounds_done{run="run 1"} 0.0' in urllib.request.urlopen(url).read().decode()
        for done in (1, 2):
            metrics.round(SimpleNamespace(round=done), RECORD, 2.0)  # type: ignore[arg-type]
        said = urllib.request.urlopen(url).read().decode()
    for line in (
        'fedtail_rounds_done{run="run 1"} 2.0',
        'fedtail_seconds_total{run="run 1"} 4.0',
        'fedtail_bytes_total{direction="down",run="run 1"} 200.0',
        'fedtail_refusals_total{run="run 1",site="south"} 4.0',
        'fedtail_refusals_total{run="run 1",site="no\\"rth"} 0.0',
        'fedtail_epsilon{run="run 1"} 1.5',
        'fedtail_site_last_seen_timestamp_seconds{run="run 1",site="no\\"rth"} 1.7e+09',
        'fedtail_site_in_last_round{run="run 1",site="south"} 0.0',
    ):
        assert line in said.splitlines(), line
    assert all(LINE.fullmatch(line) or line.startswith("# ") for line in said.splitlines())


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(FedtailError, match=f"deploy.metrics_port = {port}: Address already in use"),
            served(Metrics("r", [], 1, {}), port),
        ):
            pass
