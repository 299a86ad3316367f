"""``ledger.jsonl``: the noisy answers that a site has given, over all runs, for its policy's budget.

An answer is known by the exchange of an agreement that it was for, never by what a server calls it, and counts once.
It is on disk before it leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fedtail.federate.exchanges import write_durably
from fedtail.federate.protocol.faults import CodedError

KIND = "releases"
"""What noisy answers are called in the file, in which earlier versions have counted other things, too."""


class Ledger:
    """The noisy answers of a site; two processes that share its folder see each other's."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        self.answers: dict[str, tuple[float, int]] = {}
        """Exchange -> noise multiplier and number of answers: more than one where an earlier version has added up what
        was past."""
        self.read = 0
        if self.path.is_file():
            with self._locked():
                if not self.read:
                    raise self._damaged("is empty")

    def charge(
        self, exchange: str, noise: float, check: Callable[[dict[float, int]], None] = lambda releases: None
    ) -> None:
        """Enter what is about to leave, once. ``check`` raises if that, with all that was spent, is too much."""
        with self._locked():
            if exchange in self.answers:
                return
            spent = self.releases()
            check({**spent, noise: spent.get(noise, 0) + 1})
            entry = {"time": time.time(), "kind": KIND, "key": exchange, "amount": 1, "noise": noise}
            self._append((json.dumps(entry) + "\n").encode())
            self.answers[exchange] = noise, 1

    def releases(self) -> dict[float, int]:
        """Noise multiplier -> answers given with it, ever."""
        out: Counter[float] = Counter()
        for noise, amount in self.answers.values():
            out[noise] += amount
        return dict(out)

    # -- the file ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Around a look at the ledger and what is written after it; one process at a time, up to date."""
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

    def _append(self, line: bytes) -> None:
        """Return once the line is on disk. The file appears with its first one, so an empty file is a damaged one."""
        if not self.path.exists():
            write_durably(self.path, [line])
        else:
            with self.path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self.read += len(line)

    def _catch_up(self) -> None:
        """What another process has written, or this one before it was started again."""
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
                if told["kind"] == KIND:
                    self.answers[str(told["key"])] = float(told["noise"]), int(told["amount"])
            except (ValueError, KeyError, TypeError):
                raise self._damaged("has a line that cannot be read") from None
        self.read += len(data)
