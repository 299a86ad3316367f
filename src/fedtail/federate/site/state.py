"""What a method keeps at a site between rounds, by round, so that a resumed server finds the state it left.

A round's runs leave one state per probe. Which probe won is known at the site only with the next message, so
the states wait until then. The last rounds are kept: a server that resumes from an older checkpoint repeats
rounds, and they must start from what they started from the first time.
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import torch as safetensors_torch

from fedtail.core.records import Tensors

KEEP = 20
"""Rounds of state kept; a checkpoint older than this cannot be resumed with a stateful method."""


class SiteState:
    """States of one run. On disk where the site has a folder, else in memory."""

    def __init__(self, folder: Path | None, run: str) -> None:
        self.folder = None if folder is None else folder / "state" / re.sub(r"[^\w.-]", "_", run)
        self.memory: dict[str, Tensors] = {}
        self.rivals: dict[int, SiteState] = {0: self}

    def rival(self, number: int) -> SiteState:
        """What is kept for one of several models side by side."""
        if number not in self.rivals:
            own = self.rivals[number] = SiteState(None, "")
            own.folder = None if self.folder is None else self.folder / f"rival-{number}"
        return self.rivals[number]

    def before(self, round: int) -> Tensors:
        """The state round ``round`` starts from; later states are dropped, they belong to a future undone."""
        starts = {self._round(name): name for name in self._names() if name.startswith("start-")}
        for later in [r for r in starts if r > round]:
            self._drop(starts.pop(later))
        return self._read(starts[max(starts)]) if starts else {}

    def hold(self, round: int, states: list[Tensors]) -> None:
        """Keep what each probe of a round would leave, until ``commit``."""
        for name in [n for n in self._names() if n.startswith("probe-") and self._round(n) == round]:
            self._drop(name)
        for probe, state in enumerate(states):
            if state:
                self._write(f"probe-{round:06d}-{probe}", state)

    def commit(self, round: int, probe: int) -> None:
        """Probe ``probe`` of ``round`` was kept. Safe to repeat."""
        held = [n for n in self._names() if n.startswith("probe-") and self._round(n) == round]
        name = f"probe-{round:06d}-{probe}"
        if name in held:
            self._write(f"start-{round + 1:06d}", self._read(name))
        for old in held:
            self._drop(old)
        for old in [n for n in self._names() if n.startswith("start-") and self._round(n) < round + 1 - KEEP]:
            self._drop(old)

    @staticmethod
    def _round(name: str) -> int:
        return int(name.split("-")[1])

    def _names(self) -> list[str]:
        if self.folder is None:
            return sorted(self.memory)
        return sorted(p.stem for p in self.folder.glob("*.safetensors")) if self.folder.exists() else []

    def _read(self, name: str) -> Tensors:
        if self.folder is None:
            return self.memory[name]
        return dict(safetensors_torch.load_file(self.folder / f"{name}.safetensors"))

    def _write(self, name: str, state: Tensors) -> None:
        if self.folder is None:
            self.memory[name] = state
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{name}.tmp"
        safetensors_torch.save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, temporary)
        temporary.replace(self.folder / f"{name}.safetensors")

    def _drop(self, name: str) -> None:
        if self.folder is None:
            self.memory.pop(name, None)
        else:
            (self.folder / f"{name}.safetensors").unlink(missing_ok=True)
