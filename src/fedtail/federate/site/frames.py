"""Messages over a unix socket: named parts of bytes, each with its length in front. Standard library only."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

MAX_NAME, MAX_PARTS, MAX_BYTES = 1024, 10_000, 1 << 36
COUNT, NAME, SIZE = struct.Struct("!I"), struct.Struct("!H"), struct.Struct("!Q")


def send(connection: socket.socket, parts: Mapping[str, bytes]) -> None:
    """Write one message."""
    connection.sendall(COUNT.pack(len(parts)))
    for name, data in parts.items():
        label = name.encode()
        connection.sendall(NAME.pack(len(label)) + label + SIZE.pack(len(data)))
        connection.sendall(data)


def receive(connection: socket.socket) -> dict[str, bytes]:
    """Read one message; ``ConnectionError`` if the peer goes away or does not speak this format."""
    (count,) = COUNT.unpack(_exactly(connection, COUNT.size))
    if count > MAX_PARTS:
        raise ConnectionError(f"{count} parts in a message")
    parts = {}
    for _ in range(count):
        (length,) = NAME.unpack(_exactly(connection, NAME.size))
        if length > MAX_NAME:
            raise ConnectionError(f"a part's name of {length} bytes")
        try:
            name = _exactly(connection, length).decode()
        except UnicodeDecodeError:
            raise ConnectionError("a part's name that is no text") from None
        (size,) = SIZE.unpack(_exactly(connection, SIZE.size))
        if size > MAX_BYTES:
            raise ConnectionError(f"a part of {size} bytes")
        parts[name] = _exactly(connection, size)
    return parts


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes, in memory only as they come: a size is what the peer says."""
    pieces, left = [], size
    while left:
        piece = connection.recv(min(left, 1 << 20))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


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
