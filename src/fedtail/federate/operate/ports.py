"""Ports on this machine, and the proxy in front of them: which are free, whether nginx is there."""

from __future__ import annotations

import os
import shutil
import socket

from fedtail.errors import FedtailError


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


def free_port() -> int:
    """A port on loopback nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_nginx() -> str | None:
    """Debian keeps it in a folder that is not on every user's path."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
