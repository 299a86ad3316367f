"""What a method keeps at a site between rounds, by round, so that a resumed server finds the state it left.

A round's runs leave one state per probe. Which probe won is known at the site only with the next message, so
the states wait until then. The last rounds are kept: a server that resumes from an older checkpoint repeats
rounds, and they must start from what they started from the first time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import torch as safetensors_torch

from fedtail.core.records import Tensors

KEEP = 20
"""Rounds of state kept; a checkpoint older than this cannot be resumed with a stateful method."""
START, PROBE = "start", "probe"
Key = tuple[str, int, int]
"""What is kept: the start of a round, or what a probe of it has left; the round; the probe."""


class SiteState:
    """States of one run. On disk where the site has a folder, else in memory."""

    def __init__(self, folder: Path | None, run: str) -> None:
        self.folder = None if folder is None else folder / "state" / re.sub(r"[^\w.-]", "_", run)
        self.memory: dict[Key, Tensors] = {}
        self.rivals: dict[int, SiteState] = {0: self}

    def rival(self, number: int) -> SiteState:
        """What is kept for one of several models side by side."""
        if number not in self.rivals:
            own = self.rivals[number] = SiteState(None, "")
            own.folder = None if self.folder is None else self.folder / f"rival-{number}"
        return self.rivals[number]

    def before(self, round: int) -> Tensors:
        """The state round ``round`` starts from; later states are dropped, they belong to a future undone."""
        starts = [key for key in self._keys() if key[0] == START]
        self._drop(key for key in starts if key[1] > round)
        known = [key for key in starts if key[1] <= round]
        return self._read(max(known)) if known else {}

    def hold(self, round: int, states: list[Tensors]) -> None:
        """Keep what each probe of a round would leave, until ``commit``."""
        self._drop(key for key in self._keys() if key[:2] == (PROBE, round))
        for probe, state in enumerate(states):
            if state:
                self._write((PROBE, round, probe), state)

    def commit(self, round: int, probe: int) -> None:
        """Probe ``probe`` of ``round`` was kept. Safe to repeat."""
        keys = self._keys()
        if (PROBE, round, probe) in keys:
            self._write((START, round + 1, 0), self._read((PROBE, round, probe)))
        self._drop(k for k in keys if k[:2] == (PROBE, round) or (k[0] == START and k[1] < round + 1 - KEEP))

    def _keys(self) -> list[Key]:
        if self.folder is None:
            return list(self.memory)
        named = [file.stem.split("-") for file in self.folder.glob("*.safetensors")]
        return [(kind, int(round), int(probe)) for kind, round, probe in named]

    def _file(self, key: Key) -> Path:
        assert self.folder is not None
        return self.folder / f"{key[0]}-{key[1]:06d}-{key[2]}.safetensors"

    def _read(self, key: Key) -> Tensors:
        return self.memory[key] if self.folder is None else dict(safetensors_torch.load_file(self._file(key)))

    def _write(self, key: Key, state: Tensors) -> None:
        if self.folder is None:
            self.memory[key] = state
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._file(key).with_suffix(".tmp")
        safetensors_torch.save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, temporary)
        temporary.replace(self._file(key))

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if self.folder is None:
                self.memory.pop(key, None)
            else:
                self._file(key).unlink(missing_ok=True)
