"""Processes of a rehearsal: start them marked, find all that carry the mark, end every one of them.

Flower starts processes of its own, some in sessions of their own, and the sites' workers outlive the message that
started them. All inherit an environment variable with the deployment's path, and by it they are found again.
"""

from __future__ import annotations

import contextlib
import os
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
    """``superlink`` or ``site:<name>``; children have the role of their parent."""
    command: str

    @property
    def is_worker(self) -> bool:
        return " ".join(WORKER) in self.command


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
    mark, out = f"{MARK}={folder.resolve()}", []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        if mark in environment and command:
            roles = [e.removeprefix(f"{ROLE}=") for e in environment if e.startswith(f"{ROLE}=")]
            out.append(Process(int(entry.name), roles[0] if roles else "", command))
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
