"""``ledger.jsonl``: rounds and noisy answers that a site has given, over all runs, for its policy's limits.

An entry is known by what was asked (the hash of the message, or an exchange of an agreement), never by what a server
calls it, and counts once. It is on disk before its answer leaves.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from fedtail.federate.protocol.policy import PolicyError
from fedtail.files import sync

Kind = Literal["rounds", "releases"]
DAY = 86400.0
FILE_BYTES = 8_000_000
"""A file that is larger is written anew when it is opened: yesterday's entries, but for what is counted for good."""


@dataclass(frozen=True)
class Entry:
    """One thing that was given away."""

    time: float
    kind: str
    key: str
    amount: int
    noise: float = 0.0
    """Of ``releases``: the noise multiplier."""


class Ledger:
    """The entries of a site. In memory without a folder; two processes that share a folder see each other's."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = None if folder is None else folder / "ledger.jsonl", clock
        self.entries: dict[tuple[str, str], Entry] = {}
        self.read = 0
        if self.path is not None and self.path.is_file():
            with self._locked():
                if not self.entries:
                    raise self._damaged("is empty")
                self._shorten()

    def charge(self, kind: Kind, key: str, limit: int = 0, *, noise: float = 0.0) -> bool:
        """Enter what is about to leave, once; False if it has been entered already. ``PolicyError`` beyond ``limit``
        (0: none) in 24 hours."""
        with self._locked():
            if (kind, key) in self.entries:
                return False
            if limit and self.spent(kind) + 1 > limit:
                raise PolicyError("policy-limit", f"site policy: {limit} of {limit} {kind} per day are used up")
            self._append(Entry(self.clock(), kind, key, 1, noise))
        return True

    def spent(self, kind: Kind) -> int:
        """What was given away of a kind in the last 24 hours."""
        since = self.clock() - DAY
        return sum(e.amount for (k, _), e in self.entries.items() if k == kind and e.time > since)

    def releases(self) -> dict[float, int]:
        """Noise multiplier -> updates released with it, ever."""
        out: dict[float, int] = {}
        for (kind, _), entry in self.entries.items():
            if kind == "releases":
                out[entry.noise] = out.get(entry.noise, 0) + entry.amount
        return out

    # -- the file ------------------------------------------------------------------------------------------------

    def _locked(self) -> _Lock:
        return _Lock(self)

    def _damaged(self, how: str) -> PolicyError:
        return PolicyError(
            "site",
            f"{str(self.path)!r} {how}, so nobody knows what this site gave away; restore the file, or delete it to "
            "begin with full budgets",
        )

    def _append(self, entry: Entry) -> None:
        """Return once the entry is on disk. The file appears with its first entry, so an empty one is a damaged one."""
        if self.path is not None:
            said = {k: v for k, v in vars(entry).items() if v not in (None, 0.0) or k == "time"}
            line = (json.dumps(said) + "\n").encode()
            new = not self.path.exists()
            target = self.path.with_suffix(".tmp") if new else self.path
            with target.open("wb" if new else "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
                self.read = file.tell()
            if new:
                target.replace(self.path)
                sync(self.path.parent)
        self.entries[entry.kind, entry.key] = entry

    def _catch_up(self) -> None:
        """What another process has written, or this one before it was started again."""
        size = self.path.stat().st_size if self.path is not None and self.path.is_file() else 0
        if size < self.read:
            raise self._damaged("has become shorter")
        if self.path is None or size == self.read:
            return
        with self.path.open("r+b") as file:
            file.seek(self.read)
            data = file.read()
            if data and not data.endswith(b"\n"):  # power went while a line was written: its answer never left
                whole = data.rfind(b"\n") + 1
                file.truncate(self.read + whole)
                data = data[:whole]
            for line in data.splitlines():
                entry = _entry(line)
                if entry is None:
                    raise self._damaged("has a line that cannot be read")
                self.entries[entry.kind, entry.key] = entry
            self.read += len(data)

    def _shorten(self) -> None:
        """Write a file that has grown large anew, atomically: of the past, what is counted for good, added up."""
        assert self.path is not None
        if self.path.stat().st_size <= FILE_BYTES:
            return
        since, kept = self.clock() - DAY, {k: e for k, e in self.entries.items() if e.time > self.clock() - DAY}
        for (kind, _), entry in self.entries.items():
            if kind == "releases" and entry.time <= since:
                name = ("releases", f"past/{entry.noise!r}")
                before = kept[name].amount if name in kept else 0
                kept[name] = Entry(0.0, "releases", name[1], before + entry.amount, entry.noise)
        if not kept:  # an empty file would be a damaged one
            kept = dict([next(reversed(self.entries.items()))])
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines((json.dumps(vars(entry)) + "\n").encode() for entry in kept.values())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self.entries, self.read = kept, self.path.stat().st_size


class _Lock:
    """Around a look at the ledger and what is written after it; one process at a time, up to date."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.file: IO[bytes] | None = None

    def __enter__(self) -> None:
        if self.ledger.path is not None:
            self.file = self.ledger.path.with_suffix(".lock").open("wb")
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.ledger._catch_up()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


def _entry(line: bytes) -> Entry | None:
    """What a line says; None for one that cannot be read."""
    try:
        told = json.loads(line)
        return Entry(
            time=float(told["time"]),
            kind=str(told["kind"]),
            key=str(told["key"]),
            amount=int(told.get("amount", 0)),
            noise=float(told.get("noise", 0.0)),
        )
    except (ValueError, KeyError, TypeError):
        return None


def message_key(phase: str, parts: Mapping[str, bytes]) -> str:
    """The hash of a message, whatever the order of its parts."""
    found = hashlib.sha256(phase.encode())
    for name in sorted(parts):
        label = name.encode()
        found.update(len(label).to_bytes(8, "big") + label + len(parts[name]).to_bytes(8, "big"))
        found.update(parts[name])
    return found.hexdigest()
