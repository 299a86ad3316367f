"""A whole Flower federation on loopback, with TLS and node authentication, shared by the tests that need one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtail.runs.config import check_config
from fedtail.settings import Settings

K = 3


def settings(**sections: dict[str, Any]) -> Settings:
    """A tiny federation: blobs, an MLP, three rounds."""
    raw: dict[str, Any] = {
        "data": {"name": "blobs", "clients": K, "n_max": 120, "n_classes": 4, "n_features": 6, "spread": 2.0},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"batch_size": 32},
        "run": {"rounds": 3, "seed": 3, "validate_every": 0},
        "server": {"aggregate": "mean"},  # the simulator's, whose model it is compared with
        "deploy": {"timeout": 90.0},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return check_config(raw)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def find_nginx() -> str | None:
    """Return the path of nginx, which Debian keeps in a folder that is not on every user's path."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def through_the_proxy(deployment: Any) -> str:
    """Where sites reach the server: behind nginx where it is installed."""
    return f"127.0.0.1:{deployment.proxy_port}" if find_nginx() else ""


@contextlib.contextmanager
def proxy(deployment: Any) -> Iterator[str]:
    """The generated proxy, at work where nginx is installed; ``host:port``."""
    if (program := find_nginx()) is None:
        yield ""
        return
    server = deployment.server
    command = [program, "-c", str(server / "nginx.conf"), "-p", str(server), "-g", "daemon off;"]
    with (server / "nginx.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield through_the_proxy(deployment)
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def flower_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Sites north, east and south, through the generated proxy where nginx is there; ended, with all they started,
    when the tests are over."""
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("flwr is not installed (pip install 'fedtail[flower]')")
    from fedtail.federate.operate import local, processes
    from fedtail.federate.operate.create import create_deployment
    from fedtail.federate.operate.processes import free_port

    folder: Path = tmp_path_factory.mktemp("flower") / "fed"
    deployment = create_deployment(folder, ("north", "east", "south"), settings(), port=free_port())
    try:
        with proxy(deployment) as address:
            local.up(deployment, server=address)
            yield deployment
    finally:
        local.down(deployment)
        assert processes.find(folder) == []
