"""How far a run is inside a round, and how long it will take: known once the first local steps are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedtail.core.records import Task
from fedtail.words import duration

EVERY = 0.2
"""Seconds between two reports, at least."""
SETTLED = 5.0
"""Seconds after which an estimate is worth something; before, it is mostly of what happens once."""


@dataclass(frozen=True)
class Progress:
    """Where a run is; prints as one line."""

    round: int
    """Rounds done."""
    rounds: int
    share: float
    """Share of this round's local training that is done."""
    left: float | None
    """Seconds that are left of all rounds, by the pace so far; None while there is nothing to go by."""

    @property
    def estimate(self) -> str:
        """``about 4 min left``; empty while there is nothing to go by."""
        return "" if self.left is None else f"about {duration(self.left)} left"

    def __str__(self) -> str:
        done = f"round {self.round + 1}/{self.rounds}, {self.share:.0%} of its training done"
        return ", ".join(filter(None, (done, self.estimate)))


ProgressHook = Callable[[Progress], None]


class Pace:
    """The time that a run has left, by what training took since its first part, which has all that happens once inside
    it. A round that tries several values per client (a race, a search) is counted as so many."""

    def __init__(self, rounds: int, hook: ProgressHook | None) -> None:
        self.rounds, self.hook = rounds, hook
        self._began: float | None = None
        self._shown = time.perf_counter()
        self._trained, self._round, self._values, self._share = 0.0, 0, 1, 0.0

    def follow(self, task: Task, rivals: Sequence[int]) -> Task:
        """Return the task with its progress reported. ``rivals``: numbers of the models of which each is a part of the
        round; empty for a single one."""
        if self.hook is None:
            return task
        rivals = rivals or (task.rival,)
        if task.rival == rivals[0]:
            self.begin(task.round, task.n_probes * len(rivals))
        return replace(task, advance=lambda part: self.advance(part / len(rivals)))

    def begin(self, round: int, values: int) -> None:
        """The last round is over, and one begins in which each client tries so many values."""
        self._trained += self._values * self._share
        self._round, self._values, self._share = round, values, 0.0

    def advance(self, part: float) -> None:
        """``Task.advance`` of the round: so much more of its local training is done."""
        now = time.perf_counter()
        self._share = min(self._share + part, 1.0)
        if self._began is None:
            self._began, self._trained = now, -self._values * part
        if self.hook is not None and now - self._shown >= EVERY:
            self._shown = now
            self.hook(Progress(self._round, self.rounds, self._share, self._left(now - self._began)))

    def _left(self, spent: float) -> float | None:
        trained = self._trained + self._values * self._share
        ahead = self._values * (1 - self._share) + self.rounds - self._round - 1
        return spent / trained * ahead if spent >= SETTLED and trained > 0 else None
