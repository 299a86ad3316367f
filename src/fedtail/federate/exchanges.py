"""Totals by numbered exchanges, on disk before they are used: a process that is killed goes on where it was."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import numpy as np

from fedtail.core.totals import LIMIT, Part, Reach
from fedtail.errors import FedtailError
from fedtail.federate.protocol.wire import Parts
from fedtail.federate.site.frames import decode, encode
from fedtail.files import sync


def write_durably(file: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file that only its user can read; return once it is on disk, whole."""
    partial = file.with_suffix(".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.writelines(pieces)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)
    sync(file.parent)


class Journal:
    """Messages by number, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for parent in (folder.parent, folder.parent.parent):  # else a message is on disk in a folder that is not
            sync(parent)

    def write(self, number: int, parts: Parts) -> None:
        """Return once the message is on disk."""
        write_durably(self.folder / f"{number:08d}.bin", encode(parts))

    def settle(self, number: int, parts: Parts) -> Parts:
        """What is on disk of a message from now on: this or, where there are two processes, what was there first."""
        with (self.folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (first := self.read(number)) is not None:
                return first
            self.write(number, parts)
        return parts

    def read(self, number: int) -> Parts | None:
        file = self.folder / f"{number:08d}.bin"
        if not file.is_file():
            return None
        with file.open("rb") as data:
            try:
                parts = decode(data.read)
                if data.read(1):
                    raise ValueError("longer than it says")
            except ValueError as error:
                raise FedtailError(f"{str(file)!r} cannot be read ({error}); restore it, or start a new run") from None
        return parts

    def forget(self, numbers: Container[int]) -> None:
        for file in self.folder.glob("*.bin"):
            if int(file.stem) in numbers:
                file.unlink()


class Exchanges:
    """``core.totals.Totals`` over the sites of an agreement, one exchange for each."""

    here: Sequence[int] = ()

    def __init__(self, names: Sequence[str], groups: Sequence[Sequence[int]], journal: Journal) -> None:
        self.names, self.groups, self.journal = list(names), groups, journal
        self.n_clients = len(self.names)
        self.number = 0
        """Exchanges so far."""

    def total(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        return self._next([range(self.n_clients)], size, part, limit, reach)[0]

    def group_totals(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        return self._next(self.groups, size, part, limit, reach)

    def _next(self, groups: Sequence[Sequence[int]], size: int, part: Part, limit: int, reach: Reach) -> np.ndarray:
        self.number += 1
        return self.sums(self.number, groups, size, part, limit, reach)

    def sums(
        self, number: int, groups: Sequence[Sequence[int]], size: int, part: Part, limit: int, reach: Reach
    ) -> np.ndarray:
        """(groups, size) int64 of one exchange."""
        raise NotImplementedError

    def forget(self, since: int, number: int) -> None:
        """Drop what nobody needs who begins after exchange ``number`` again; what was said up to ``since`` stays."""
        raise NotImplementedError
