"""What was said in a run's exchanges, on disk before it is used: a process that is killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from fedtail.errors import FedtailError
from fedtail.federate.protocol.wire import Parts
from fedtail.files import sync

Kind = Literal["answer", "sum"]


class Journal:
    """Messages by kind and number. In memory without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[tuple[str, int], Parts] = {}
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, kind: Kind, number: int, parts: Parts) -> None:
        """Return once the message is on disk, whole."""
        if self.folder is None:
            self._memory[kind, number] = parts
            return
        file = self._file(kind, number)
        partial = file.with_suffix(".partial")
        header = json.dumps({name: len(data) for name, data in parts.items()}).encode()
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.writelines([len(header).to_bytes(8, "big"), header, *parts.values()])
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
        sync(self.folder)

    def read(self, kind: Kind, number: int) -> Parts | None:
        if self.folder is None:
            return self._memory.get((kind, number))
        file = self._file(kind, number)
        if not file.is_file():
            return None
        data, parts = file.read_bytes(), Parts()
        try:
            start = 8 + int.from_bytes(data[:8], "big")
            for name, size in json.loads(data[8:start]).items():
                parts[name], start = data[start : start + size], start + size
        except (ValueError, AttributeError) as error:
            raise FedtailError(f"{str(file)!r} cannot be read ({error}); restore it, or start a new run") from None
        if start != len(data):
            raise FedtailError(f"{str(file)!r} is not as long as it says; restore it, or start a new run")
        return parts

    def forget(self, kind: Kind, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self.folder is None:
                self._memory.pop((kind, number), None)
            else:
                self._file(kind, number).unlink(missing_ok=True)

    def numbers(self, kind: Kind) -> list[int]:
        """Those that are there, ascending."""
        if self.folder is None:
            return sorted(n for k, n in self._memory if k == kind)
        return sorted(int(file.stem.split("-")[1]) for file in self.folder.glob(f"{kind}-*.bin"))

    def _file(self, kind: Kind, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{kind}-{number:08d}.bin"
