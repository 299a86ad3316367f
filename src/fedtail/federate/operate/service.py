"""``fedtail site run``: keeps a site's client, Flower's SuperNode, at work, and says how it goes.

It starts the client again when it ends, or when it is alive and of no use, without an answer from a server that can be
reached. It runs for months beside the client, so it imports neither torch nor Flower. What both say goes to standard
output, which systemd's journal keeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fedtail.errors import FedtailError
from fedtail.federate.deployment import split_address
from fedtail.federate.flower import CONTACT, SITE
from fedtail.federate.operate.processes import flower_environment, free_port, supernode_command
from fedtail.federate.site.config import load_site
from fedtail.files import is_locked, write_atomically

NEEDED = {
    "site.key": "make it with `fedtail site keys {folder}` and send site.pub to the server's operator",
    "site.pub": "make a new key with `fedtail site keys {folder} --new` and send it to the server's operator",
    "ca.crt": "it came with the site's folder; ask the server's operator for it",
}
"""File of a site -> what to do without it: the client would end at once, again and again."""


@dataclass
class Health:
    """``health.json``, written at every look."""

    site: str
    server: str
    state: str = "starting"
    """``connected``, or what it is instead: ``starting``, ``server unreachable``, ``no contact``, ``waiting`` (to start
    it again), ``stopped``; ``down`` where no service runs."""
    detail: str = ""
    pid: int = 0
    """Of the client."""
    contact: float = 0.0
    """When the server last answered; 0 for never."""
    started: float = 0.0
    restarts: int = 0
    time: float = 0.0


class SiteService:
    """The service of the site in ``folder``; ``server`` overrides the address in ``site.toml``."""

    look = 2.0
    """Seconds between looks at the client."""
    stale = 60.0
    """Without an answer for so long, a connection is lost: heartbeats are due every 18 to 23 seconds."""
    grace = 30.0
    """For so long a server that can be reached again may be found by the SuperNode itself."""
    pauses = (5.0, 5.0, 10.0, 10.0, 15.0, 15.0, 30.0, 60.0)
    """Seconds before the first, second ... start in a row that came to nothing. Flower refuses a site that was killed
    until its last heartbeat has expired, up to a minute."""

    def __init__(self, folder: Path, server: str = "") -> None:
        self.folder, file = folder.resolve(), folder / "site.toml"
        config = load_site(file)
        self.address = server or config.server
        if not self.address:
            raise FedtailError(f"{str(file)!r}: [site] has no server; add server = 'host:port', or use --server")
        split_address("server", self.address)
        for needed, how in NEEDED.items():
            if not (self.folder / needed).is_file():
                raise FedtailError(f"{str(self.folder / needed)!r} is missing; {how.format(folder=folder)}")
        self.health = Health(config.name, self.address)
        self.stopping = threading.Event()
        self.contact = self.folder / CONTACT

    def run(self) -> None:
        """Keep the client at work until told to stop."""
        with alone(self.folder):
            log(f"site {self.health.site!r}: service started, process {os.getpid()}, server {self.address}")
            idle = 0
            while True:
                process = self.start()
                try:
                    reason = self.watch(process)
                finally:
                    end(process)
                if self.stopping.is_set():
                    break
                idle = 0 if self.health.contact > self.health.started else idle + 1
                pause = self.pauses[min(idle, len(self.pauses) - 1)]
                self.health.restarts += 1
                log(f"{reason}; restarting it in {pause:g} s")
                self.tell("waiting", reason)
                if self.stopping.wait(pause):
                    break
            log("service stopped")
            self.tell("stopped")

    def stop(self, *_: object) -> None:
        """Stop the service; also a handler of signals."""
        self.stopping.set()

    def start(self) -> subprocess.Popen[bytes]:
        """Start a new client."""
        command = supernode_command(self.folder, self.address, free_port())
        environment = flower_environment(self.folder / "flwr") | {SITE: str(self.folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        self.health.pid, self.health.started = process.pid, time.time()
        log(f"SuperNode started, process {process.pid}")
        self.tell("starting")
        return process

    def watch(self, process: subprocess.Popen[bytes]) -> str:
        """Watch the client; returns why it must be started again."""
        reachable = 0.0  # seconds for which the server could be reached and yet did not answer
        while not self.stopping.wait(self.look):
            if (code := process.poll()) is not None:
                doctor = f"; find out why: fedtail deploy doctor --site {self.folder} --server {self.address}"
                met = self.health.contact >= self.health.started
                return f"the SuperNode exited with code {code}{'' if met else doctor}"
            with contextlib.suppress(OSError):  # none yet
                self.health.contact = self.contact.stat().st_mtime
            silent = time.time() - max(self.health.contact, self.health.started)
            state, fault = "connected" if self.health.contact >= self.health.started else "starting", ""
            if silent > self.stale:
                fault = tls_fault(self.address, self.folder / "ca.crt")
                state = "server unreachable" if fault else "no contact"
            reachable = reachable + self.look if state == "no contact" else 0.0
            if reachable > self.grace:
                return f"the SuperNode has had no answer for {silent:.0f} s, although the server is reachable"
            if (state, fault) != (self.health.state, self.health.detail):
                log(f"{state}{': ' + fault if fault else ''}")
            self.tell(state, fault)
        return "stopped"

    def tell(self, state: str, detail: str = "") -> None:
        self.health.state, self.health.detail, self.health.time = state, detail, time.time()
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            write_atomically(self.folder / "health.json", json.dumps(asdict(self.health)))


def log(line: str) -> None:
    """Say a line with the time; a full disk is no reason to end."""
    with contextlib.suppress(OSError):
        os.write(1, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode())


def tls_fault(address: str, ca: Path, timeout: float = 5.0) -> str:
    """Return why no TLS connection to the server can be made; empty if one can."""
    host, port = split_address("server", address)
    try:
        context = ssl.create_default_context(cafile=str(ca))
        with socket.create_connection((host, port), timeout) as plain, context.wrap_socket(plain, server_hostname=host):
            return ""
    except OSError as error:  # TLS's own errors are of this kind too
        return f"{address}: {error}"


def end(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """End a client and all it started; asked first, it signs off."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the site's lock: of two clients with one key, each would be refused in turn."""
    with (folder / "service.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FedtailError(f"another service is already running the site in {str(folder)!r}") from None
        yield


def read_health(folder: Path) -> Health:
    """Return a site's health; ``down`` where no service runs."""
    config, file = load_site(folder / "site.toml"), folder / "health.json"
    known = Health(config.name, config.server)
    with contextlib.suppress(OSError, ValueError, TypeError):  # none yet, or of another version
        known = Health(**json.loads(file.read_text()))
    if not is_locked(folder / "service.lock"):
        known.state, known.detail = "down", f"start it with: fedtail site run {folder}"
    return known
