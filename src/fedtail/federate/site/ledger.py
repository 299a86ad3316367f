"""``ledger.jsonl``: rounds and noisy answers that a site has given, over all runs, for its policy's limits.

An entry is known by what was asked (the hash of the message, or an exchange of an agreement), never by what a server
calls it, and counts once. It is on disk before its answer leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedtail.federate.exchanges import write_durably
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.policy import PolicyError

Kind = Literal["rounds", "releases"]
DAY = 86400.0


@dataclass(frozen=True)
class Entry:
    """One thing that was given away."""

    time: float
    kind: str
    key: str
    amount: int = 1
    """More where an earlier version has added up what was past."""
    noise: float = 0.0
    """Of ``releases``: the noise multiplier."""

    @property
    def line(self) -> bytes:
        return (json.dumps(vars(self)) + "\n").encode()


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

    def charge(self, kind: Kind, key: str, limit: int = 0, *, noise: float = 0.0) -> bool:
        """Enter what is about to leave, once; False if it has been entered already. ``PolicyError`` beyond ``limit``
        (0: none) in 24 hours."""
        with self._locked():
            if (kind, key) in self.entries:
                return False
            if limit and self.spent(kind) + 1 > limit:
                raise PolicyError("policy-limit", f"{limit} of {limit} {kind} per day are used up")
            self._append(Entry(self.clock(), kind, key, noise=noise))
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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Around a look at the ledger and what is written after it; one process at a time, up to date."""
        if self.path is None:
            yield
            return
        with self.path.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._catch_up()
            yield

    def _damaged(self, how: str) -> CodedError:
        return CodedError(
            "site",
            f"{str(self.path)!r} {how}, so nobody knows what this site gave away; restore the file, or delete it to "
            "begin with full budgets",
        )

    def _append(self, entry: Entry) -> None:
        """Return once the entry is on disk. The file appears with its first entry, so an empty one is a damaged one."""
        if self.path is not None and not self.path.exists():
            write_durably(self.path, [entry.line])
            self.read = len(entry.line)
        elif self.path is not None:
            with self.path.open("ab") as file:
                file.write(entry.line)
                file.flush()
                os.fsync(file.fileno())
                self.read = file.tell()
        self.entries[entry.kind, entry.key] = entry

    def _catch_up(self) -> None:
        """What another process has written, or this one before it was started again."""
        assert self.path is not None
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < self.read:
            raise self._damaged("has become shorter")
        if size == self.read:
            return
        with self.path.open("r+b") as file:
            file.seek(self.read)
            data = file.read()
            if not data.endswith(b"\n"):  # power went while a line was written: its answer never left
                data = data[: data.rfind(b"\n") + 1]
                file.truncate(self.read + len(data))
        for line in data.splitlines():
            try:
                told = json.loads(line)
                amount, noise = int(told.get("amount", 0)), float(told.get("noise", 0.0))
                entry = Entry(float(told["time"]), str(told["kind"]), str(told["key"]), amount, noise)
            except (ValueError, KeyError, TypeError):
                raise self._damaged("has a line that cannot be read") from None
            self.entries[entry.kind, entry.key] = entry
        self.read += len(data)


def message_key(phase: str, parts: Mapping[str, bytes]) -> str:
    """The hash of a message, whatever the order of its parts."""
    found = hashlib.sha256(phase.encode())
    for name in sorted(parts):
        label = name.encode()
        found.update(len(label).to_bytes(8, "big") + label + len(parts[name]).to_bytes(8, "big"))
        found.update(parts[name])
    return found.hexdigest()
