"""Progress on standard error: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fedtail.words import NONE, fixed

if TYPE_CHECKING:
    from fedtail.rounds.progress import Progress as Inside
    from fedtail.rounds.state import State


def terminal(**options: Any) -> Console:
    """A console that prints names as users wrote them: rich would read the [kg] of a column as markup."""
    return Console(highlight=False, markup=False, emoji=False, **options)


console = terminal(stderr=True)


def eta(began: float, done: int, total: int) -> str:
    """``ETA 40 s``, by the time that so much has taken."""
    return f"ETA {(time.perf_counter() - began) / max(done, 1) * (total - done):.0f} s"


def print_notes(notes: Iterable[object]) -> None:
    """Print what a user should know, on standard error, a line each."""
    for note in map(str, notes):
        warned = note.startswith("warning: ")
        console.print(note if warned else f"note: {note}", style="yellow" if warned else "dim", soft_wrap=True)


def progress_bar(**options: Any) -> Progress:
    """A bar on standard error with count, note and time left; tasks have the field ``note``."""
    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        **options,
    )


ENCODED = 1000
"""Images between two lines of progress, where there is no terminal."""

SELDOM = 30.0
"""Seconds between two lines on the inside of a round, where there is no terminal."""


class Stopped(Exception):
    """Ctrl-C, with one line to print on how to go on; the command exits with code 130."""


class Encoded:
    """A line now and then on how far an encoder is."""

    def __init__(self) -> None:
        self.began, self.first = time.perf_counter(), -1

    def __call__(self, done: int, total: int) -> None:
        if self.first < 0:  # what came from the cache took no time
            self.began, self.first = time.perf_counter(), done
        if done % ENCODED == 0 or done == total:
            left = eta(self.began, done - self.first, total - self.first)
            console.print(f"encoding images  {done:,}/{total:,}  {left}", soft_wrap=True)


class RoundProgress:
    """Shows round, loss, macro F1, tail accuracy and the split they are of, and the time left. A run's ``on_round``."""

    def __init__(self, title: str, rounds: int, command: str, *, resume: bool = False, quiet: bool = False) -> None:
        self.title, self.rounds, self.command, self.resume, self.quiet = title, rounds, command, resume, quiet
        self.folder: Path | None = None
        self.done = 0
        self.live = console.is_terminal and not quiet
        self.began, self.first = time.perf_counter(), 0
        self._encoded = Encoded()
        self._said = -math.inf
        self._progress = progress_bar()
        self._task = self._progress.add_task(title, total=rounds, note="")

    def __enter__(self) -> RoundProgress:
        if self.live:
            self._progress.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.live:
            self._progress.stop()
        if isinstance(error, KeyboardInterrupt) and self.folder is not None:
            rounds_done = f"{self.done} of {self.rounds} rounds done"
            raise Stopped(f"{rounds_done}; resume with: {self.command} {self.folder} --resume") from None

    def encoded(self, done: int, total: int) -> None:
        """Images that an encoder has done; shown before the first round."""
        if self.live:
            self._progress.update(self._task, note=f"encoding images {done:,}/{total:,}" if done < total else "")
        elif not self.quiet:
            self._encoded(done, total)

    def start(self, folder: Path, done: int) -> None:
        """Where the run is written, and how many rounds were done before (a resumed run)."""
        self.folder, self.done = folder, done
        self.first, self.began = done, time.perf_counter()
        self._progress.update(self._task, completed=done)
        if self.resume and not done and not self.quiet:
            print_notes([f"nothing to resume in {folder}; starting at round 1"])

    def inside(self, where: Inside) -> None:
        """How far a round is: in a terminal all the time, elsewhere the first estimate and then now and then."""
        if self.quiet:
            return
        if self.live:
            self._progress.update(self._task, completed=where.round + where.share)
            if where.round == self.first and where.left is not None:  # later the bar knows, and notes are of metrics
                self._progress.update(self._task, note=where.estimate)
        elif where.left is not None and time.perf_counter() - self._said > SELDOM:
            self._said = time.perf_counter()
            console.print(f"{self.title}  {where}", soft_wrap=True)

    def __call__(self, state: State, record: dict[str, Any], seconds: float) -> None:
        self.done = state.round
        if self.quiet:
            return
        split = "test" if record.get("test") else "validation"
        metrics = record.get(split) or {}
        note = f"loss {record['train_loss']:.3f}"
        if metrics:
            shown = {name: fixed(metrics.get(key)) for key, name in (("macro_f1", "macro F1"), ("tail", "tail"))}
            known = [f"{name} {value}" for name, value in shown.items() if value != NONE]
            note += f"  {split} {' '.join(known)}" if known else ""
        if record.get("race"):
            note += f"  racing {len(record['race'])} learning rates"
        elif record["searching"]:
            note += "  searching rates"
        if record["refused"]:
            note += f"  refused {len(record['refused'])}"
        if self.live:
            self._progress.update(self._task, completed=state.round, note=note)
            return
        step = max(1, self.rounds // 10)
        if state.round % step == 0 or state.round == self.rounds or state.round == self.first + 1:
            left = eta(self.began, state.round - self.first, self.rounds - self.first)
            console.print(f"{self.title}  round {state.round}/{self.rounds}  {note}  {left}", soft_wrap=True)
