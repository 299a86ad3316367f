"""Processes of a rehearsal: start them marked, find all that carry the mark, end every one of them.

Flower starts processes of its own, some in sessions of their own, and the sites' workers outlive the message that
started them. All inherit an environment variable with the deployment's path, and by it they are found again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtail.federate.site.worker_client import WORKER

MARK, ROLE = "FEDTAIL_DEPLOYMENT", "FEDTAIL_ROLE"


@dataclass(frozen=True)
class Process:
    """A running process of a deployment."""

    pid: int
    role: str
    """``superlink``, ``proxy`` or ``site:<name>``; children have the role of their parent."""
    command: str

    @property
    def program(self) -> str:
        """The program's name, without interpreter and path."""
        if " ".join(WORKER) in self.command:
            return "worker"
        ours = re.search(r"/federate/flower/(superlink|supernode|superexec)\.py", self.command)
        names = [Path(word).name for word in self.command.split()[:3]]
        return f"flower-{ours[1]}" if ours else next((n for n in names if not n.startswith(("python", "-"))), "?")


def start(folder: Path, role: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a process of the deployment in ``folder`` in its own session; returns its id."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**environment, MARK: str(folder.resolve()), ROLE: role},
        )
    return process.pid


def find(folder: Path, role: str | None = None) -> list[Process]:
    """The running processes of a deployment, oldest first; of one role if given, or of all ``site:`` s."""
    mark = f"{MARK}={folder.resolve()}".encode()
    proxy = str(folder.resolve() / "server" / "nginx.conf")
    out = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        if command.startswith("nginx: master") and proxy in command:
            out.append(Process(int(entry.name), "proxy", command))  # nginx writes its title over its environment
            continue
        if mark not in environment or not command:
            continue
        roles = [e.partition(b"=")[2].decode() for e in environment if e.startswith(ROLE.encode() + b"=")]
        out.append(Process(int(entry.name), roles[0] if roles else "", command))
    return sorted((p for p in out if role in (None, p.role, f"{p.role.partition(':')[0]}:")), key=lambda p: p.pid)


def stop(folder: Path, role: str | None = None, grace: float = 5.0) -> int:
    """End all processes of a deployment (of one role, if given): ask first, then force. Returns how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + grace
    for number in (signal.SIGTERM, signal.SIGKILL):
        asked: set[int] = set()
        while left := find(folder, role):
            for process in left:
                if process.pid not in asked:
                    asked.add(process.pid)
                    ended.add(process.pid)
                    send_signal(process.pid, number)
            if number == signal.SIGTERM and time.monotonic() > deadline:
                break
            time.sleep(0.1)
    return len(ended)


def send_signal(pid: int, number: int) -> None:
    """Signal one process; one that has ended already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
