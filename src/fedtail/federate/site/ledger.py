"""``ledger.jsonl``: all that a site has given away, over all phases, runs and restarts. Its policy's limits go by it.

An entry is known by what was asked (the hash of the message) or by what was released, never by what a server calls it:
fifty models that are all called round 0 are fifty rounds, and a message that comes again is answered again with the
same bits, at no further cost. An entry is on disk before its answer leaves.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from fedtail.federate.protocol.policy import PolicyError
from fedtail.files import sync

Kind = Literal["rounds", "statistics", "validations", "splits", "releases"]
DAY = 86400.0
FILE_BYTES = 8_000_000
"""A file that is larger is written anew when it is opened: yesterday's entries, but for what is counted for good."""
BUCKETS, PERIOD = 256, 1_048_573
"""Numbers that stand for a model, and the prime period of their signs."""


@dataclass(frozen=True)
class Entry:
    """One thing that was given away."""

    time: float
    kind: str
    key: str
    amount: int
    noise: float = 0.0
    """Of ``releases``: the noise multiplier."""
    about: dict[str, Any] | None = None


class Ledger:
    """The entries of a site. In memory without a folder; two processes that share a folder see each other's."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = None if folder is None else folder / "ledger.jsonl", clock
        self.secret = os.urandom(32) if folder is None else read_secret(folder / "secret")
        self.entries: dict[tuple[str, str], Entry] = {}
        self.read = 0
        if self.path is not None and self.path.is_file():
            with self._locked():
                if not self.entries:
                    raise self._damaged("is empty")
                self._shorten()

    def charge(
        self,
        kind: Kind,
        key: str,
        limit: int,
        amount: int = 1,
        *,
        noise: float = 0.0,
        about: dict[str, Any] | None = None,
    ) -> bool:
        """Enter what is about to leave, once; False if it has been entered already. ``PolicyError`` beyond ``limit``
        (0: none) in 24 hours."""
        with self._locked():
            if (kind, key) in self.entries:
                return False
            spent = self.spent(kind)
            if limit and spent + amount > limit:
                more = f" and {amount} more were requested" if amount > 1 else ""
                raise PolicyError("policy-limit", f"site policy: {spent} of {limit} {kind} per day are used up{more}")
            self._append(Entry(self.clock(), kind, key, amount, noise, about))
        return True

    def note(self, key: str, **about: Any) -> None:
        """Say more of a round that was entered, which the next is compared with; the larger of two numbers stays."""
        with self._locked():
            entry = self.entries["rounds", key]
            before = entry.about or {}
            grown = {name: max(value, before.get(name, value)) for name, value in about.items()}
            if before != {**before, **grown}:
                self._append(replace(entry, about={**before, **grown}))

    def unknown(self, kind: Kind, keys: Iterable[str]) -> list[str]:
        """Those that have not been entered, in order."""
        with self._locked():
            return sorted(key for key in set(keys) if (kind, key) not in self.entries)

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

    def last(self, kind: Kind, **about: Any) -> Entry | None:
        """The newest entry of a kind that says this of itself."""
        found = (e for (k, _), e in reversed(self.entries.items()) if k == kind and e.about is not None)
        return next((e for e in found if all((e.about or {}).get(n) == v for n, v in about.items())), None)

    def sign(self, *labels: str | bytes) -> str:
        """A name that only this site can make."""
        parts = [label.encode() if isinstance(label, str) else label for label in labels]
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self.secret, framed, hashlib.sha256).hexdigest()

    def sketch(self, x: Tensor) -> list[float]:
        """A few numbers that stand for a model: two sketches are as far apart as the models, give or take a tenth.
        Nobody else knows the signs, so nobody can look for a model that is far away and looks near."""
        n = x.numel()
        bits = hashlib.shake_128(self.secret + b"sketch").digest(-(-min(n, PERIOD) // 8))
        unpacked = torch.frombuffer(bytearray(bits), dtype=torch.uint8).unsqueeze(-1) >> torch.arange(8) & 1
        signs = (2.0 * unpacked.flatten()[: min(n, PERIOD)] - 1).repeat(-(-n // PERIOD))[:n]
        padded = torch.nn.functional.pad(x.detach().cpu().float() * signs, (0, -n % BUCKETS))
        return [round(float(v), 6) for v in padded.view(-1, BUCKETS).sum(0, dtype=torch.float64)]

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
            about=told.get("about"),
        )
    except (ValueError, KeyError, TypeError):
        return None


def read_secret(path: Path) -> bytes:
    """The site's own secret, which never leaves it; made where there is none."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        pass
    found = path.read_bytes()
    if len(found) != 32:
        raise PolicyError("site", f"{str(path)!r} is not the site's secret; delete it, and a new one will be created")
    return found


def message_key(phase: str, parts: Mapping[str, bytes]) -> str:
    """The hash of a message, whatever the order of its parts."""
    found = hashlib.sha256(phase.encode())
    for name in sorted(parts):
        label = name.encode()
        found.update(len(label).to_bytes(8, "big") + label + len(parts[name]).to_bytes(8, "big"))
        found.update(parts[name])
    return found.hexdigest()
