"""A whole federation on this machine, for rehearsal: the SuperLink, every site, TLS and authentication included."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtail.core.errors import FedtailError
from fedtail.deploy import processes
from fedtail.deploy.commands import flower_environment, superlink_command, supernode_command
from fedtail.deploy.control import Control, is_healthy, wait_until_healthy
from fedtail.deploy.layout import Deployment

PROGRAMS = Path(sys.executable).parent


def up(deployment: Deployment, seconds: float = 90.0, *, proxy: bool = False) -> None:
    """Start SuperLink and sites, register the sites and wait until all are online.

    With ``proxy`` sites connect through nginx and the generated configuration, as they would from outside.
    """
    if processes.find(deployment.folder):
        raise FedtailError(f"{deployment.name!r} is running; end it with `fedtail deploy down {deployment.folder}`")
    if not is_free(deployment.host, deployment.port):
        raise FedtailError(
            f"port {deployment.port} is taken by another program; set another in {deployment.folder}/deployment.toml"
        )
    try:
        start_superlink(deployment)
        wait_until_healthy(deployment, seconds, deployment.server / "superlink.log")
        with Control(deployment) as control:
            for site in deployment.sites:
                control.register(site)
        outside = f"127.0.0.1:{deployment.proxy_port}" if proxy else ""
        if proxy:
            start_proxy(deployment)
        for site in deployment.sites:
            start_site(deployment, site, outside)
        wait_until_online(deployment, seconds)
    except BaseException:
        processes.stop(deployment.folder)
        raise


def start_superlink(deployment: Deployment) -> int:
    """Start Flower's server; its state is in a database, so it can be killed and started again."""
    environment = flower_environment(deployment.flwr_home, PROGRAMS)
    log = deployment.server / "superlink.log"
    return processes.start(deployment.folder, "superlink", superlink_command(PROGRAMS, deployment), log, environment)


def start_proxy(deployment: Deployment, seconds: float = 10.0) -> int:
    """Start nginx with the generated configuration."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise FedtailError("nginx is not installed; install it, or leave out --proxy")
    server = deployment.server
    command = [program, "-c", str(server / "nginx.conf"), "-p", str(server), "-g", "daemon off;"]
    pid = processes.start(deployment.folder, "proxy", command, server / "nginx.log", dict(os.environ))
    deadline = time.monotonic() + seconds
    while is_free("127.0.0.1", deployment.proxy_port):
        if time.monotonic() > deadline:
            raise FedtailError(f"nginx does not listen on port {deployment.proxy_port}; see {server}/nginx.log")
        time.sleep(0.1)
    return pid


def start_site(deployment: Deployment, site: str, superlink: str = "") -> int:
    """Start one site; its worker starts with the first message."""
    folder = deployment.site(site)
    command = supernode_command(PROGRAMS, folder, superlink or f"{deployment.host}:{deployment.port}", free_port())
    environment = flower_environment(folder / "flwr", PROGRAMS)
    return processes.start(deployment.folder, f"site:{site}", command, folder / "supernode.log", environment)


def wait_until_online(deployment: Deployment, seconds: float) -> None:
    """Wait for all sites; says which are missing."""
    deadline = time.monotonic() + seconds
    while True:
        with Control(deployment) as control:
            missing = [n.site for n in control.nodes() if n.status != "online"]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise FedtailError(
                f"sites {', '.join(missing)} did not come online within {seconds:g} s; see sites/*/supernode.log"
            )
        time.sleep(0.3)


def down(deployment: Deployment) -> int:
    """End everything the deployment started on this machine; returns how many processes there were."""
    return processes.stop(deployment.folder)


def run(deployment: Deployment, *, config: Path | None = None, resume: bool = False, mode: str = "train") -> int:
    """Start a run over the sites that are online; returns Flower's run id. ``mode``: ``train`` or ``doctor``."""
    if not is_healthy(deployment):
        raise FedtailError(f"no SuperLink is running; start it with `fedtail deploy up {deployment.folder}`")
    with Control(deployment) as control:
        if mode == "train":
            end_previous(deployment, control, resume)
            (deployment.server / "run.json").unlink(missing_ok=True)
        run_id = control.start_run(
            config=str(config or deployment.config), deployment=str(deployment.folder), sites=len(deployment.sites),
            resume=resume, mode=mode,
        )  # fmt: skip
    if mode == "train":
        (deployment.server / "run.id").write_text(f"{run_id}\n")
    return run_id


def end_previous(deployment: Deployment, control: Control, resume: bool) -> None:
    """Two runs at once would share sites and folder. One whose server died is ended, or sites would work on for it."""
    file = deployment.server / "run.id"
    if not file.is_file() or read_status(deployment).get("state") in ("finished", "failed"):
        return
    previous = int(file.read_text())
    if control.run_status(previous)[0].startswith(("finished", "unknown")):
        return
    if not resume:
        raise FedtailError(f"a run is going on; end it first with `fedtail deploy stop {deployment.folder}`")
    control.stop_run(previous)


def stop_run(deployment: Deployment) -> bool:
    """End the run that is going on; its checkpoint stays. False if there is none."""
    file = deployment.server / "run.id"
    with Control(deployment) as control:
        if not file.is_file() or control.run_status(int(file.read_text()))[0].startswith(("finished", "unknown")):
            return False
        control.stop_run(int(file.read_text()))
    return True


def wait(
    deployment: Deployment, run_id: int, on_change: Callable[[dict[str, Any]], None] | None = None, poll: float = 0.5
) -> dict[str, Any]:
    """Follow a run to its end; returns its last status. ``FedtailError`` if it failed."""
    last: dict[str, Any] = {}
    asked = time.monotonic()
    while True:
        now = read_status(deployment)
        if now != last and on_change is not None:
            on_change(now)
        last = now
        if now.get("state") == "finished":
            return now
        if now.get("state") == "failed":
            raise FedtailError(str(now["error"]))
        if time.monotonic() - asked > 5.0:  # the run may have ended without a word of ours
            asked = time.monotonic()
            with Control(deployment) as control:
                status, details = control.run_status(run_id)
            if status.startswith("finished") and read_status(deployment).get("state") not in ("finished", "failed"):
                raise FedtailError(f"Flower ended the run ({status}): {details}; see {deployment.server}/superlink.log")
        time.sleep(poll)


def read_status(deployment: Deployment) -> dict[str, Any]:
    """What the running or last run says of itself; empty if none has started."""
    path = deployment.server / "run.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port on loopback nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
