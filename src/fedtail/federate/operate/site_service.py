"""``fedtail site run``: keeps a site's client, Flower's SuperNode or NVFlare's, at work, and says how it goes.

It starts the client, and starts it again when it ends, or when it is alive and of no use: without an answer from a
server that can be reached. While the server cannot be reached, nothing is to be gained, and it is left alone. It runs
for months beside the client, so it imports neither torch nor Flower.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

from fedtail.errors import FedtailError
from fedtail.federate.deployment import split_address
from fedtail.federate.operate.site_clients import FlowerClient, NVFlareClient, SiteClient
from fedtail.federate.site.identity import read_identity
from fedtail.files import is_locked, write_atomically

STALE_SECONDS = 60.0
"""Without an answer for so long, a connection is lost: heartbeats are due every 18 to 23 seconds."""
ANSWER_SECONDS = 120.0
"""For so long a message may have no answer although nothing works on it: it takes a moment to fetch and to send."""
GRACE_SECONDS = 30.0
"""For so long a server that can be reached again may be found by the SuperNode itself."""
PAUSES = (5.0, 5.0, 10.0, 10.0, 15.0, 15.0, 30.0, 60.0)
"""Seconds before the first, second ... start in a row that came to nothing. Flower refuses a site that was killed until
its last heartbeat has expired, up to a minute."""
LOG_BYTES, LOG_FILES = 5_000_000, 5
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LEVEL = re.compile(r"(?:(DEBUG|INFO|WARNING|ERROR) *: *)?(.*)")


@dataclass
class Health:
    """``health.json``, written at every look."""

    site: str
    server: str
    state: str = "starting"
    """``connected``, or what it is instead: ``starting``, ``server unreachable``, ``no contact``, ``useless``,
    ``waiting`` (to start it again), ``stopped``; ``down`` where no service runs."""
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

    def __init__(
        self,
        folder: Path,
        server: str = "",
        *,
        stale: float = STALE_SECONDS,
        answer: float = ANSWER_SECONDS,
        grace: float = GRACE_SECONDS,
        look: float = 2.0,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self.folder = folder.resolve()
        self.client = client_of(self.folder, server)
        self.stale, self.answer, self.grace, self.look, self.pauses = stale, answer, grace, look, pauses
        self.health = Health(read_identity(self.folder / "site.toml").name, self.client.address)
        self.log = site_log(self.folder)
        self.stopping = threading.Event()
        self.last_words = ""

    def run(self) -> None:
        """Keep the client at work until told to stop."""
        with alone(self.folder):
            self.log.info(
                f"site {self.health.site!r}: service started, process {os.getpid()}, server {self.client.address}"
            )
            idle = 0
            while not self.stopping.is_set():
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
                self.log.info(f"{reason}; restarting it in {pause:g} s")
                self.tell("waiting", reason)
                self.stopping.wait(pause)
            self.log.info("service stopped")
            self.tell("stopped", "")

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Stop the service; also a handler of signals."""
        self.stopping.set()

    def start(self) -> subprocess.Popen[str]:
        """Start a new client."""
        process = subprocess.Popen(
            self.client.command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=self.client.environment(),
        )
        self.last_words = ""
        self.copier = threading.Thread(target=self.copy_log, args=(process,), daemon=True)
        self.copier.start()
        self.health.pid, self.health.started = process.pid, time.time()
        self.tell("starting", "")
        self.log.info(f"{self.client.name} started, process {process.pid}")
        return process

    def copy_log(self, process: subprocess.Popen[str]) -> None:
        """Copy the client's lines into the log, without colours; its last error is why it ended."""
        assert process.stdout is not None
        failed = False
        for line in process.stdout:
            level, text = LEVEL.fullmatch(COLOUR.sub("", line).strip()).groups()  # type: ignore[union-attr]
            if not text:
                continue
            if level == "ERROR" or (failed and not level):  # an error may have several lines
                self.last_words = f"{self.last_words} {text}".strip() if failed and not level else text
            elif not failed:
                self.last_words = text
            failed = failed or level == "ERROR"
            self.log.info(f"  {level.lower() + ': ' if level in ('WARNING', 'ERROR') else ''}{text}")

    def watch(self, process: subprocess.Popen[str]) -> str:
        """Watch the client; returns why it must be started again."""
        watchdog = Watchdog(self.stale, self.grace)
        while not self.stopping.wait(self.look):
            code = process.poll()
            if code is not None:
                self.copier.join(1.0)  # its last words; what it started may hold the pipe open for longer
                return f"the {self.client.name} exited with code {code}: {self.last_words or 'no output'}"
            self.health.contact = self.client.contact(process.pid)
            waits = self.client.unanswered()
            if waits > self.answer:
                return f"a message has had no answer for {waits:.0f} s, and nothing works on it"
            silent = time.time() - max(self.health.contact, self.health.started)
            before = self.health.state, self.health.detail
            state, detail = watchdog.judge(silent, lambda: tls_fault(self.client.address, self.client.ca))
            if state == "connected" and self.health.contact < self.health.started:
                state = "starting"
            if (state, detail) != before:
                self.log.info(f"{state}{': ' + detail if detail else ''}")
            self.tell(state, detail)
            if state == "useless":
                return f"the {self.client.name} has had no answer for {silent:.0f} s, although the server is reachable"
        return "stopped"

    def tell(self, state: str, detail: str) -> None:
        self.health.state, self.health.detail, self.health.time = state, detail, time.time()
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            write_atomically(self.folder / "health.json", json.dumps(asdict(self.health)))


def client_of(folder: Path, server: str = "") -> SiteClient:
    """Return NVFlare's client where ``site.toml`` names its startup kit, else Flower's SuperNode."""
    identity = read_identity(folder / "site.toml")
    if identity.nvflare:
        if server:
            raise FedtailError(f"--server {server}: NVFlare's startup kit names the server; leave out --server")
        return NVFlareClient(folder / identity.nvflare)
    address = server or identity.server
    if not address:
        file = str(folder / "site.toml")
        raise FedtailError(f"{file!r}: [site] has no server; add server = 'host:port', or use --server")
    return FlowerClient(folder, address)


class Watchdog:
    """Judges a client that is alive by how long the server has been silent, and whether it can be reached."""

    def __init__(self, stale: float, grace: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stale, self.grace, self.clock = stale, grace, clock
        self.reachable_since: float | None = None

    def judge(self, silent: float, fault: Callable[[], str]) -> tuple[str, str]:
        """Return state and detail. silent: seconds since the last answer; fault: why the server cannot be reached,
        empty if it can."""
        if silent <= self.stale:
            self.reachable_since = None
            return "connected", ""
        why = fault()
        if why:
            self.reachable_since = None
            return "server unreachable", why
        now = self.clock()
        if self.reachable_since is None:
            self.reachable_since = now
        if now - self.reachable_since >= self.grace:
            return "useless", ""
        return "no contact", "the server can be reached"


def tls_fault(address: str, ca: Path, timeout: float = 5.0) -> str:
    """Return why no TLS connection to the server can be made; empty if one can."""
    host, port = split_address("server", address)
    try:
        context = ssl.create_default_context(cafile=str(ca))
        with socket.create_connection((host, port), timeout) as plain, context.wrap_socket(plain, server_hostname=host):
            return ""
    except (OSError, ssl.SSLError) as error:
        return f"{address}: {error}"


def end(process: subprocess.Popen[str], seconds: float = 10.0) -> None:
    """End a client and all it started; asked first, it signs off."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def site_log(folder: Path) -> logging.Logger:
    """Return the logger to ``site.log``, of which the last files are kept, and to standard error."""
    log = logging.getLogger(f"fedtail.site.{folder}")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers.clear()
    handlers = (
        RotatingFileHandler(folder / "site.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8"),
        logging.StreamHandler(),
    )
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
    return log


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
    identity, file = read_identity(folder / "site.toml"), folder / "health.json"
    known = Health(**json.loads(file.read_text())) if file.is_file() else Health(identity.name, identity.server)
    if not is_locked(folder / "service.lock"):
        known.state, known.detail = "down", f"start it with: fedtail site run {folder}"
    return known
