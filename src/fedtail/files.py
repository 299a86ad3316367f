"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(partial)
    partial.replace(path)


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """A TOML file, or one line that says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedtailError(f"{str(path)!r} is not valid TOML: {error}{hint}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or one line that says what is wrong with the file; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FedtailError(f"{path}: not a valid JSON file ({error})") from error
    if not isinstance(content, dict):
        raise FedtailError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def hash_file(path: Path, kind: str = "sha256") -> str:
    """The hash of a file's content."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, kind).hexdigest()


def sync(path: Path) -> None:
    """Return when what was written is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(place: Path, *, wait: bool) -> Iterator[None]:
    """Inside, no other process has locked this file or folder: it is waited for, or else a ``BlockingIOError``.

    The kernel lets go of a lock with the process, however that ends. What cannot be locked is nobody's.
    """
    with ExitStack() as held:
        try:
            import fcntl  # not on every system

            handle = os.open(place, os.O_RDONLY)
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except (ImportError, OSError):  # it is not there, or its file system has no locks
            pass
        yield


def is_locked(file: Path) -> bool:
    """Return whether a living process holds the lock."""
    try:
        with locked(file, wait=False):
            return False
    except BlockingIOError:
        return True
