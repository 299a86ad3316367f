"""Stock Flower, started by its own commands: ``fedtail deploy app`` and ``flwr run`` train on sites that it knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.cli import app
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.processes import QUIET, free_port
from fedtail.runs.record import read_history
from tests.federate.conftest import settings

PROGRAMS = Path(sys.executable).parent
SITES = ("east", "north")


class Stock:
    """Flower's programs, without anything of fedtail's around them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        home = folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}

    def start(self, program: str, *arguments: str) -> None:
        log = (self.folder / f"{len(self.processes)}-{program}.log").open("wb")
        command = [str(PROGRAMS / program), "--insecure", *arguments]
        self.processes.append(
            subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, start_new_session=True)
        )

    def logs(self) -> str:
        return "\n".join(f"{f.name}: {f.read_text(errors='replace')[-1500:]}" for f in self.folder.glob("*.log"))


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Stock]:
    stock = Stock(tmp_path)
    try:
        yield stock
    finally:
        for process in reversed(stock.processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for worker in tmp_path.rglob("worker.pid"):  # it outlives the process that Flower started for a message
            os.kill(int(worker.read_text()), signal.SIGKILL)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_flwr_run_trains_on_stock_supernodes(stock: Stock) -> None:
    config = settings(
        data={"clients": 2}, run={"rounds": 1, "name": "plain", "folder": str(stock.folder / "runs")},
        deploy={"timeout": 450.0},
    )  # fmt: skip
    made = create_deployment(stock.folder / "fed", SITES, config)
    (stock.folder / "config.toml").write_text(config.to_toml())
    assert CliRunner().invoke(app, ["deploy", "app", str(stock.folder / "app")]).exit_code == 0
    stock.start("flower-superlink", "--port", str(stock.port))
    for site in SITES:
        node = ("--node-config", f"site='{made.site(site) / 'site.toml'}'", "--port", str(free_port()))
        stock.start("flower-supernode", "--superlink", f"127.0.0.1:{stock.port}", *node)
    settled = f'config="{stock.folder / "config.toml"}" sites=2'
    command = [str(PROGRAMS / "flwr"), "run", str(stock.folder / "app"), "here", "--run-config", settled]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(command, env=stock.environment, capture_output=True, text=True)
        if done.returncode == 0 or time.monotonic() > deadline:  # the SuperLink takes a moment to start
            break
        time.sleep(0.5)
    assert done.returncode == 0, done.stdout + done.stderr + stock.logs()
    deadline = time.monotonic() + 180
    while not (stock.folder / "runs" / "plain" / "result.json").is_file():
        assert time.monotonic() < deadline, stock.logs()
        time.sleep(0.3)
    (record,) = read_history(stock.folder / "runs" / "plain")
    assert record["clients"] == [0, 1] and record["refused"] == []
