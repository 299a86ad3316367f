"""The programs of a federation: their commands and environment; start them marked, find them, end every one of them.

Flower starts processes of its own, some in sessions of their own, and the sites' workers outlive the message that
started them. All inherit an environment variable with the deployment's path, and by it they are found again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtail.federate import flower
from fedtail.federate.deployment import Deployment

MARK, ROLE = "FEDTAIL_DEPLOYMENT", "FEDTAIL_ROLE"


@dataclass(frozen=True)
class Process:
    """A running process of a deployment."""

    pid: int
    role: str
    """``superlink`` or ``site:<name>``; children have the role of their parent."""
    command: str


def start(folder: Path, role: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a process of the deployment in ``folder`` in its own session; returns its id."""
    marked = {**environment, MARK: str(folder.resolve()), ROLE: role}
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=marked
        ).pid


def find(folder: Path, role: str | None = None) -> list[Process]:
    """The running processes of a deployment, oldest first; of one role if given, or of all ``site:`` s."""
    out = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            lines = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        process = Process(int(entry.name), variables.get(ROLE, ""), command)
        if variables.get(MARK) == str(folder.resolve()) and command and process.pid != os.getpid():
            out.append(process)
    return sorted((p for p in out if role in (None, p.role, f"{p.role.partition(':')[0]}:")), key=lambda p: p.pid)


def stop(folder: Path, role: str | None = None, grace: float = 5.0) -> int:
    """End all processes of a deployment (of one role, if given): ask first, then force. Returns how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + grace
    while left := find(folder, role):
        late = time.monotonic() > deadline
        for process in left:
            if late or process.pid not in ended:
                ended.add(process.pid)
                send_signal(process.pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.1)
    return len(ended)


def send_signal(pid: int, number: int) -> None:
    """Signal one process; one that has ended already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


PROGRAMS = Path(sys.executable).parent
SUPERNODE = Path(flower.__file__).with_name("supernode.py")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0",
}
"""No telemetry, no update check, nothing installed at run time, and prompt starts."""


def superlink_command(deployment: Deployment) -> list[str]:
    """Return the command of Flower's server: TLS, authenticated sites, state in a database, on loopback."""
    server = deployment.server
    return [
        str(PROGRAMS / "flower-superlink"),
        "--ssl-ca-certfile", str(server / "ca.crt"),
        "--ssl-certfile", str(server / "server.crt"),
        "--ssl-keyfile", str(server / "server.key"),
        "--enable-supernode-auth",
        "--host", deployment.host,
        "--port", str(deployment.port),
        "--database", str(server / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def supernode_command(site: Path, superlink: str, port: int = 9094) -> list[str]:
    """Return the command of Flower's client at a site; ``port`` is on loopback, for apps, of which there are none."""
    return [
        sys.executable, "-P", str(SUPERNODE),
        "--superlink", superlink,
        "--root-certificates", str(site / "ca.crt"),
        "--auth-supernode-private-key", str(site / "site.key"),
        "--port", str(port),
        "--isolation", "process",
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """Return the environment in which programs of a federation start: one thread, and this interpreter's programs."""
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "/usr/bin:/bin")])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, with settings apart from the user's."""
    return environment(**QUIET, FLWR_HOME=str(home))


def free_port() -> int:
    """Return a port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
