"""Messages as bytes: named parts behind a line that says how long each is. Standard library only.

They pass so over a unix socket to a site's worker, and lie so on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

MOST_NAMES, MOST_BYTES = 1 << 24, 1 << 36
"""Bytes of the names of a message's parts, and of the parts, at most."""


def encode(parts: Mapping[str, bytes]) -> list[bytes]:
    """One message, in pieces to be written one after another."""
    names = json.dumps({name: len(data) for name, data in parts.items()}).encode()
    return [len(names).to_bytes(8, "big"), names, *parts.values()]


def decode(read: Callable[[int], bytes]) -> dict[str, bytes]:
    """Inverse of ``encode``; ``ValueError`` for anything else. read: returns the next so many bytes."""

    def take(size: int) -> bytes:
        data = read(size)
        if len(data) < size:
            raise ValueError("cut short")
        return data

    length = int.from_bytes(take(8), "big")
    if length > MOST_NAMES:
        raise ValueError(f"{length} bytes of names")
    try:
        sizes = json.loads(take(length))
    except RecursionError:
        raise ValueError("names that are nested") from None
    if not isinstance(sizes, dict) or any(type(n) is not int or n < 0 for n in sizes.values()):
        raise ValueError("no names with lengths")
    if sum(sizes.values()) > MOST_BYTES:
        raise ValueError(f"parts of {sum(sizes.values())} bytes")
    return {name: take(size) for name, size in sizes.items()}


def send(connection: socket.socket, parts: Mapping[str, bytes]) -> None:
    """Write one message."""
    for piece in encode(parts):
        connection.sendall(piece)


def receive(connection: socket.socket) -> dict[str, bytes]:
    """Read one message; ``ConnectionError`` if the peer goes away or does not speak this format."""
    try:
        return decode(lambda size: _exactly(connection, size))
    except ValueError as error:
        raise ConnectionError(str(error)) from None


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes, in memory only as they come: a size is what the peer says."""
    pieces, left = [], size
    while left:
        piece = connection.recv(min(left, 1 << 20))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def socket_path(site_file: str | Path) -> Path:
    """Where the worker of a site listens: in a folder only this user can enter, under a short name, since the
    path of a unix socket may not exceed some 100 characters."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    folder = base / f"fedtail-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} must be accessible only to this user (chmod 700)")
    return folder / f"{hashlib.sha256(str(Path(site_file).resolve()).encode()).hexdigest()[:24]}.sock"
