"""A whole federation on this machine, for rehearsal: the SuperLink, every site, TLS and authentication included."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate import processes
from fedtail.federate.operate.control import Control, wait_until_healthy
from fedtail.federate.operate.membership import make_missing_keys
from fedtail.federate.site import frames


def up(deployment: Deployment, seconds: float = 600.0, server: str = "") -> None:
    """Start SuperLink and sites, register the sites and wait until all are online. Sites without keys get some.

    server: ``host:port`` of a proxy that sites connect through; by default the SuperLink itself.
    """
    if processes.find(deployment.folder):
        raise FedtailError(f"{deployment.name!r} is running; stop it with `fedtail deploy down {deployment.shown}`")
    make_missing_keys(deployment)
    check_free(deployment)
    try:
        start_superlink(deployment)
        wait_until_healthy(deployment, seconds, deployment.server / "superlink.log")
        with Control(deployment) as control:
            control.register()
            deadline = time.monotonic() + seconds
            while "online" in control.nodes().values() and time.monotonic() < deadline:
                time.sleep(0.5)  # a site that was killed counts as online for a minute, and is refused until then
        for site in deployment.sites:
            start_site(deployment, site, server)
        wait_until_online(deployment, seconds)
    except BaseException:
        down(deployment)
        raise


def serve(deployment: Deployment) -> NoReturn:
    """Become Flower's server, until it is stopped."""
    check_free(deployment)
    command = processes.superlink_command(deployment)
    os.execve(command[0], command, processes.flower_environment(deployment.flwr_home))


def start_superlink(deployment: Deployment) -> int:
    """Start Flower's server; its state is in a database, so it can be killed and started again."""
    log, environment = deployment.server / "superlink.log", processes.flower_environment(deployment.flwr_home)
    return processes.start(deployment.folder, "superlink", processes.superlink_command(deployment), log, environment)


def start_site(deployment: Deployment, site: str, server: str = "") -> int:
    """Start one site's service; its worker starts with the first message."""
    folder = deployment.site(site)
    address = server or f"{deployment.host}:{deployment.port}"
    command = [sys.executable, "-m", "fedtail", "site", "run", str(folder), "--server", address]
    return processes.start(deployment.folder, f"site:{site}", command, folder / "site.log", os.environ)


def wait_until_online(deployment: Deployment, seconds: float) -> None:
    """Wait until all sites are online; ``FedtailError`` says which are missing."""
    deadline = time.monotonic() + seconds
    with Control(deployment) as control:
        while missing := [site for site, status in control.nodes().items() if status != "online"]:
            ended = [site for site in missing if not processes.find(deployment.folder, f"site:{site}")]
            if ended or time.monotonic() > deadline:
                log = deployment.site((ended or missing)[0]) / "site.log"
                raise FedtailError(f"sites {', '.join(missing)} did not come online: {last_words(log)}; see {log}")
            time.sleep(0.3)


def last_words(log: Path) -> str:
    """Return the last line that a program wrote, without colours."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return re.sub(r"\x1b\[[0-9;]*m", "", lines[-1]).strip() if lines else "no output"


def down(deployment: Deployment) -> int:
    """End everything the deployment started on this machine; returns how many processes there were."""
    ended = processes.stop(deployment.folder, "site:")  # first, so that they can sign off
    ended += processes.stop(deployment.folder)
    for site in deployment.sites:  # a worker that had to be killed left its socket
        frames.socket_path(deployment.site(site) / "site.toml").unlink(missing_ok=True)
    return ended


def check_free(deployment: Deployment) -> None:
    """Raise if another program listens where the SuperLink should."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((deployment.host, deployment.port))
        except OSError:
            where = f"{deployment.shown}/deployment.toml"
            raise FedtailError(f"port {deployment.port} is already in use; set another in {where}") from None
