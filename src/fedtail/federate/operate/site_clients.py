"""The programs that connect a site to its federation, as the site's service sees them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Protocol

from fedtail.errors import FedtailError
from fedtail.federate.deployment import split_address
from fedtail.federate.flower import supernode
from fedtail.federate.flower.guard import APPS
from fedtail.federate.operate.commands import flower_environment, free_port, supernode_command
from fedtail.federate.site import worker_client
from fedtail.files import is_locked

ESTABLISHED = "01"
"""The state of a connection that is open, in ``/proc/net/tcp``."""


class SiteClient(Protocol):
    """A client that can be started again and again."""

    name: str
    address: str
    """``host:port`` of the server."""
    ca: Path
    """Who signed the server's certificate."""

    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]: ...

    def contact(self, pid: int) -> float:
        """When the server last answered the process; 0 for never."""
        ...

    def unanswered(self) -> float:
        """For how many seconds a message has had no answer, although nothing works on it; 0 where there is none."""
        ...


class FlowerClient:
    """Flower's SuperNode, which touches a file whenever the server has answered."""

    name = "SuperNode"

    def __init__(self, folder: Path, address: str) -> None:
        split_address("server", address)
        self.folder, self.address, self.ca = folder, address, folder / "ca.crt"
        self.file, self.waiting, self.busy = folder / "contact", folder / "waiting", 0.0
        self.apps = os.environ.get(APPS, "")

    def command(self) -> list[str]:
        return supernode_command(sys.executable, self.folder, self.address, free_port())

    def environment(self) -> dict[str, str]:
        self.apps = self.apps or apps_of(self.folder)
        flower = flower_environment(self.folder / "flwr", Path(sys.executable).parent)
        return {**flower, supernode.CONTACT: str(self.file), supernode.WAITING: str(self.waiting), APPS: self.apps}

    def contact(self, pid: int) -> float:
        return changed(self.file)

    def unanswered(self) -> float:
        if is_locked(self.folder / worker_client.ASKING):
            self.busy = time.time()
        since = changed(self.waiting)
        return time.time() - max(since, self.busy) if since else 0.0


def changed(file: Path) -> float:
    """Return when a file was last touched; 0 where there is none."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def apps_of(folder: Path) -> str:
    """Return ``site_apps``, from a process of its own, which takes torch and Flower away with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as apart:
        return apart.submit(_apps_of, folder).result()


def _apps_of(folder: Path) -> str:
    from fedtail.federate.operate.bundle import site_apps

    return site_apps(folder)


class NVFlareClient:
    """NVFlare's client from its startup kit. NVFlare's own daemon gives up after five ends in five minutes.

    It holds one connection to the server open and sends a heartbeat over it; without one it is of no use.
    """

    name = "NVFlare client"

    def __init__(self, kit: Path) -> None:
        self.kit, self.ca = kit.resolve(), kit.resolve() / "startup" / "rootCA.pem"
        file = self.kit / "startup" / "fed_client.json"
        try:
            self.address = str(json.loads(file.read_text())["servers"][0]["service"]["target"])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            raise FedtailError(
                f"nvflare = {str(kit)!r} is not a startup kit: no server address in {str(file)!r}; give the "
                "folder that "
                "holds startup/"
            ) from None
        _, self.port = split_address(f"{file}: target", self.address)
        self.last = 0.0

    def command(self) -> list[str]:
        return ["bash", str(self.kit / "startup" / "sub_start.sh"), "--once"]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "/usr/bin:/bin")])
        return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def contact(self, pid: int) -> float:
        if self.port in open_ports(pid):
            self.last = time.time()
        return self.last

    def unanswered(self) -> float:
        return 0.0


def open_ports(pid: int) -> set[int]:
    """Return the ports at the other end of a process's open TCP connections."""
    try:
        links = {str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir()}
        tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:  # it ended meanwhile
        return set()
    rows = [line.split() for table in tables for line in table]
    return {int(r[2].rpartition(":")[2], 16) for r in rows if r[3] == ESTABLISHED and f"socket:[{r[9]}]" in links}
