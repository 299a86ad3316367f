"""Hand a message to the site's worker; start one where there is none. Standard library only.

Whoever gets a message, a SuperNode or the process that a plain one starts for it, only passes bytes on to a worker that
stays alive over rounds: started on demand, started again if it died.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from . import frames

START_SECONDS = 180.0
LOG_BYTES = 5_000_000
WORKER = ("-m", "fedtail", "site", "worker")
"""The command of fedtail's, after the interpreter, that serves a site."""


class WorkerError(RuntimeError):
    """The site's worker cannot be reached or dies on this message."""


def ask(site_file: str | Path, parts: dict[str, bytes]) -> dict[str, bytes]:
    """The worker's reply. A worker that dies under the message is replaced once, then the message is given up."""
    path = Path(site_file)
    if not path.is_file():
        raise WorkerError(f"site configuration {str(path)!r} does not exist; check node-config site=...")
    for attempt in (1, 2):
        try:
            with connect(path) as connection:
                frames.send(connection, parts)
                return frames.receive(connection)
        except (ConnectionError, OSError) as error:
            if attempt == 2:
                code = error.errno or 0
                raise WorkerError(
                    f"the site's worker died twice on this message ({code}); see worker.log there"
                ) from None
    raise AssertionError("unreachable")


def connect(site_file: Path) -> socket.socket:
    """A connection to the worker, which is started first if nobody listens."""
    address = frames.socket_path(site_file)
    found = _try(address)
    if found is not None:
        return found
    with site_file.with_name("worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two messages at once, one starts the worker and both use it
        found = _try(address)
        if found is not None:
            return found
        process = start(site_file)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = _try(address)
            if found is not None:
                return found
            if process.poll() is not None:
                raise WorkerError(f"the site's worker exited with code {process.returncode}; see worker.log there")
            time.sleep(0.05)
        raise WorkerError(f"the site's worker did not listen within {START_SECONDS:g} s; see worker.log")


def start(site_file: Path) -> subprocess.Popen[bytes]:
    """Start the worker in a session of its own: it outlives the process Flower started for this message."""
    section = tomllib.loads(site_file.read_text()).get("worker", {})
    python = section.get("python") or sys.executable
    threads = str(section.get("threads", 1))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    rotate(log_path(site_file), LOG_BYTES)
    with log_path(site_file).open("ab") as log:
        return subprocess.Popen(
            [python, *WORKER, str(site_file.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            cwd=str(site_file.resolve().parent),
        )


def rotate(log: Path, most: int) -> None:
    """Put a log of more bytes aside, in the place of the one before."""
    if log.is_file() and log.stat().st_size > most:
        log.replace(log.with_name(f"{log.name}.1"))


def log_path(site_file: Path) -> Path:
    return site_file.resolve().parent / "worker.log"


def _try(address: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection
