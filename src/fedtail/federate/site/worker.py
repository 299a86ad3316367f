"""The site's worker: stays alive over rounds, so that torch is imported and data read once.

Started on demand by the first message, or by hand: ``fedtail site worker site.toml``.
It ends when idle, when told to (SIGTERM), after a message that left it too large, or when a new run finds its files
changed; the next message starts it again. Method state lives on disk, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

import torch

from fedtail.errors import FedtailError
from fedtail.federate.protocol.transport import Phase, split_phase
from fedtail.federate.protocol.wire import Parts, error_parts
from fedtail.federate.site import frames
from fedtail.federate.site.config import SiteConfig, load_site
from fedtail.federate.site.own import stamp
from fedtail.federate.site.site import Site, open_site

MEGABYTE = 1 << 20
FIRST = (Phase.HELLO, Phase.OFFER, Phase.BEGIN)
"""With which a run begins, so that it finds the data, rules and list of sites as they are now."""


class _Stop(BaseException):
    """SIGTERM, also in the middle of a message: no handler of errors may take it for one."""


def run_worker(site_file: Path) -> bool:
    """Serve a site and log why that ended. False if the site's configuration or data cannot work."""
    try:
        log(f"worker exits: {serve(load_site(site_file))}")
    except FedtailError as error:
        log(f"error: {error}")
        return False
    return True


def serve(config: SiteConfig) -> str:
    """Answer messages until there is a reason to end; returns the reason."""
    torch.set_num_threads(config.worker.threads)
    limit_memory(2 * config.worker.memory_mb)
    begun, site = stamp(config), open_site(config)
    address = frames.socket_path(config.file)
    listener = claim(address)
    if listener is None:
        return "another worker is serving this site"
    log(f"site {config.name!r} ready, process {os.getpid()}")
    signal.signal(signal.SIGTERM, _on_term)
    with contextlib.suppress(OSError):
        (config.folder / "worker.pid").write_text(f"{os.getpid()}\n")
    try:
        while True:
            listener.settimeout(config.worker.idle_minutes * 60)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return f"idle for {config.worker.idle_minutes:g} minutes"
            with connection:
                parts = receive(connection)
                phase, parts = split_phase(parts)
                if phase in FIRST and stamp(config) != begun:
                    listener.close()  # before the peer hears of it: its next try must find nobody, and start anew
                    address.unlink(missing_ok=True)
                    return "configuration or data changed"
                answer(site, phase, parts, connection)
            size = resident_mb()
            if size > config.worker.memory_mb:
                return f"uses {size:.0f} MB, more than worker.memory_mb = {config.worker.memory_mb}"
    except _Stop:
        return "stopped"
    finally:
        listener.close()
        address.unlink(missing_ok=True)
        (config.folder / "worker.pid").unlink(missing_ok=True)


def receive(connection: socket.socket) -> Parts:
    """One message; empty if the peer went away, or only connected to see whether a worker is listening."""
    try:
        return frames.receive(connection)
    except (ConnectionError, UnicodeDecodeError) as error:
        log(f"connection lost: {error}")
        return {}


def answer(site: Site, phase: str, parts: Parts, connection: socket.socket) -> None:
    """The reply to one message. A peer that goes away meanwhile is logged and forgotten."""
    began = time.perf_counter()
    if not phase:
        return
    try:
        reply = site.handle(phase, parts)
    except MemoryError:
        reply = error_parts("memory")
    try:
        frames.send(connection, reply)
        log(f"{phase}: {time.perf_counter() - began:.2f} s, {resident_mb():.0f} MB")
    except ConnectionError as error:
        log(f"connection lost: {error}")


def claim(address: Path) -> socket.socket | None:
    """The listening socket, or None if another worker of this site is alive."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(address))
        frames.send(probe, {})
        return None
    except OSError:
        address.unlink(missing_ok=True)
    finally:
        probe.close()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    address.chmod(0o600)
    listener.listen(8)
    return listener


def limit_memory(megabytes: int) -> None:
    """Refuse allocations beyond a limit: an error reply is better than a machine without memory."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = megabytes * MEGABYTE
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def resident_mb() -> float:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


def log(line: str) -> None:
    """Write one line into ``worker.log``, which is this process's standard error."""
    with contextlib.suppress(OSError):  # a full disk is no reason to end
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        sys.stderr.flush()


def _on_term(number: int, frame: FrameType | None) -> None:
    raise _Stop
