"""A whole federation on this machine, for rehearsal: the SuperLink, every site, TLS and authentication included."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.flower.guard import APPS
from fedtail.federate.operate import processes
from fedtail.federate.operate.bundle import site_apps
from fedtail.federate.operate.commands import flower_environment, superlink_command
from fedtail.federate.operate.control import Control, wait_until_healthy
from fedtail.federate.operate.membership import make_missing_keys
from fedtail.federate.operate.site_service import read_health
from fedtail.federate.site import frames

PROGRAMS = Path(sys.executable).parent


def up(deployment: Deployment, seconds: float = 90.0, *, proxy: bool = False) -> None:
    """Start SuperLink and sites, register the sites and wait until all are online. Sites without keys get some.

    With ``proxy`` sites connect through nginx and the generated configuration, as they would from outside.
    """
    if processes.find(deployment.folder):
        raise FedtailError(f"{deployment.name!r} is running; stop it with `fedtail deploy down {deployment.shown}`")
    make_missing_keys(deployment)
    for port in (deployment.port, *([deployment.proxy_port] if proxy else [])):
        check_free(deployment.host, port)
    try:
        start_superlink(deployment)
        wait_until_healthy(deployment, seconds, deployment.server / "superlink.log")
        with Control(deployment) as control:
            for site in deployment.sites:
                control.register(site)
        wait_until_forgotten(deployment, seconds)
        outside = f"127.0.0.1:{deployment.proxy_port}" if proxy else ""
        if proxy:
            start_proxy(deployment)
        for site in deployment.sites:
            start_site(deployment, site, outside)
        wait_until_online(deployment, seconds)
    except BaseException:
        down(deployment)
        raise


def serve(deployment: Deployment) -> NoReturn:
    """Become Flower's server, until it is stopped."""
    check_free(deployment.host, deployment.port)
    command = superlink_command(sys.executable, deployment)
    os.execve(command[0], command, flower_environment(deployment.flwr_home, PROGRAMS))


def start_superlink(deployment: Deployment) -> int:
    """Start Flower's server; its state is in a database, so it can be killed and started again."""
    environment = flower_environment(deployment.flwr_home, PROGRAMS)
    log = deployment.server / "superlink.log"
    return processes.start(
        deployment.folder, "superlink", superlink_command(sys.executable, deployment), log, environment
    )


def start_proxy(deployment: Deployment, seconds: float = 10.0) -> int:
    """Start nginx with the generated configuration."""
    program = find_nginx()
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
    """Start one site's service; its worker starts with the first message."""
    folder = deployment.site(site)
    address = superlink or f"{deployment.host}:{deployment.port}"
    command = [sys.executable, "-m", "fedtail", "site", "run", str(folder), "--server", address]
    environment = {**os.environ, APPS: site_apps(folder)}
    return processes.start(deployment.folder, f"site:{site}", command, folder / "service.log", environment)


def wait_until_forgotten(deployment: Deployment, seconds: float) -> None:
    """Wait until no site counts as online: one that was killed does so until its last heartbeat has expired, up to
    a minute, and Flower refuses it until then."""
    deadline = time.monotonic() + seconds
    with Control(deployment) as control:
        while control.online() and time.monotonic() < deadline:
            time.sleep(0.5)


def wait_until_online(deployment: Deployment, seconds: float) -> None:
    """Wait until all sites are online; ``FedtailError`` says which are missing."""
    deadline = time.monotonic() + seconds
    while True:
        with Control(deployment) as control:
            online = control.online()
        missing = [site for site in deployment.sites if site not in online]
        if not missing:
            return
        ended = [site for site in missing if not processes.find(deployment.folder, f"site:{site}")]
        if ended:
            log = deployment.site(ended[0]) / "service.log"
            raise FedtailError(f"site {ended[0]!r} exited instead of coming online: {last_words(log)}; see {log}")
        if time.monotonic() > deadline:
            why = read_health(deployment.site(missing[0])).detail or "reason unknown"
            raise FedtailError(
                f"sites {', '.join(missing)} did not come online within {seconds:g} s ({why}); see sites/*/site.log"
            )
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


def check_free(host: str, port: int) -> None:
    """Raise if another program listens there."""
    if not is_free(host, port):
        raise FedtailError(f"port {port} is already in use; choose another with --port")


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def find_nginx() -> str | None:
    """Return the path of nginx, which Debian keeps in a folder that is not on every user's path."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
