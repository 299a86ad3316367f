"""Cells: ordinary runs in content-addressed folders, run in parallel: in processes, or on a GPU in one.

The folder of a cell is named by a digest of everything its result depends on. So an interrupted grid continues
where it stopped, a finished cell is never run again, and two tables that share a cell share its run.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedtail.cores import grant_cores, usable_cores
from fedtail.data.registry import Pooled
from fedtail.data.sources import is_public, locate
from fedtail.errors import FedtailError, writing
from fedtail.files import hash_file
from fedtail.registry import in_words, is_own
from fedtail.runs.build import load_pooled
from fedtail.runs.config import changed, check_config, result_keys
from fedtail.runs.execution import run
from fedtail.settings import RETIRED, Settings

_latest: dict[str, Pooled] = {}
"""What the cells of a grid train on is read once by a process that runs several of them: the latest is kept."""
CHANGED = "a file that its settings name has changed since; run the same command again"
FREE_THEN = ("deploy.wait", "deploy.memory_mb", "deploy.metrics_port", "run.trackers", "data.bad_rows")
FORMER: dict[str, Any] = {key: gone.value for key, gone in RETIRED.items() if key not in FREE_THEN}
"""Settings that are gone -> the value they always had, by dotted key: digests of cells stay what they were."""
LATER: dict[str, Any] = {"deploy.trust": "server", "deploy.after": "", "decision.confidence": 0.9}
"""Settings that came later -> the value that means what there was before, which digests leave out."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid. ``label`` is for people; the digest of its settings, and of files they name, identifies it."""

    label: str
    config: Settings

    @cached_property
    def digest(self) -> str:
        keys = {k: v for k, v in result_keys(self.config).items() if LATER.get(k, ...) != v}
        files = {f"file {v}": found for v in keys.values() if isinstance(v, str) and (found := content(v))}
        text = json.dumps({**FORMER, **keys, **files}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def folder(self, base: Path) -> Path:
        """The run's folder: the one it was begun in, whatever its label was then, or a new one."""
        name = re.sub(r"[^\w.@=,+-]+", "-", self.label).strip("-")
        own = base / f"{name}-{self.digest}"
        begun = [] if own.exists() else sorted(base.glob(f"*-{self.digest}"))
        return begun[0] if begun else own


def content(word: str) -> str:
    """The hash of the file that a setting names, the user's own code or table; empty if it names none."""
    path = Path(word.rpartition(":")[0] if is_own(word) else word)
    return hash_file(path) if path.suffix and path.is_file() else ""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: a finished run folder, or the error that stopped it."""

    cell: Cell
    folder: Path
    cached: bool = False
    error: str | None = None


Launcher = Callable[[Sequence[Cell], Path], Iterator[Outcome]]
"""Runs the cells it is given and yields their outcomes, in any order."""


def seeds_of(config: Settings, label: str, seeds: Iterable[int]) -> list[Cell]:
    """Return the config under several seeds."""
    return [Cell(f"{label}-s{seed}", changed(config, {"run.seed": seed})) for seed in seeds]


def finished(folder: Path) -> bool:
    """Whether a cell's folder holds a complete run."""
    return (folder / "result.json").is_file()


def run_cells(
    cells: Sequence[Cell],
    base: Path,
    *,
    workers: int = 1,
    on_done: Callable[[Outcome], None] | None = None,
    launcher: Launcher | None = None,
) -> list[Outcome]:
    """Run what is not finished yet; outcomes come in the order of ``cells``.

    ``workers`` run at once, in processes of their own or, on a GPU, in this one. A cell that fails does not stop the
    others: its outcome carries the error. ``launcher`` replaces all that, by a cluster for instance.
    """
    with writing(base):
        base.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}

    def note(outcome: Outcome) -> None:
        outcomes[outcome.cell.digest] = outcome
        if on_done is not None:
            on_done(outcome)

    todo: dict[str, Cell] = {}
    for cell in cells:
        if finished(cell.folder(base)):
            note(Outcome(cell, cell.folder(base), cached=True))
        else:
            todo.setdefault(cell.digest, cell)
    if launcher is None:
        missing = fetch_data(todo.values())
        if not outcomes and todo and all(data_of(c) in missing for c in todo.values()):
            raise FedtailError(next(iter(missing.values())))  # none can run: one reason, not one per cell
        for cell in [c for c in todo.values() if data_of(c) in missing]:
            note(Outcome(todo.pop(cell.digest), cell.folder(base), error=missing[data_of(cell)]))
    if todo:
        chosen = launcher or (one_by_one if min(workers, len(todo)) <= 1 else in_processes(workers))
        try:
            for outcome in chosen(list(todo.values()), base):
                note(outcome)
        finally:
            _latest.clear()  # files may change from now on
    return [outcomes[cell.digest] for cell in cells]


def data_of(cell: Cell) -> tuple[str, str | None]:
    """Which data a cell reads, and from where."""
    return cell.config.data.name, cell.config.data.dir


def fetch_data(cells: Iterable[Cell]) -> dict[tuple[str, str | None], str]:
    """Download the public data of these cells once, before their processes ask for it.

    Returns the reason for each data set, by ``data_of``, that cannot be had.
    """
    missing = {}
    for name, folder in dict.fromkeys(data_of(cell) for cell in cells):
        if is_public(name):
            try:
                locate(name, folder)
            except FedtailError as error:
                missing[name, folder] = str(error)
    return missing


def on_gpu(cells: Sequence[Cell]) -> bool:
    return all(cell.config.engine.device.startswith("cuda") for cell in cells)


def one_by_one(cells: Sequence[Cell], base: Path) -> Iterator[Outcome]:
    """The plain launcher: this process, one cell after another."""
    for cell in cells:
        yield run_cell(cell, base)


def in_processes(workers: int) -> Launcher:
    """A launcher with ``workers`` fresh processes; torch does not survive a fork."""

    def launch(cells: Sequence[Cell], base: Path) -> Iterator[Outcome]:
        context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
        n = min(workers, len(cells))
        share = max(1, usable_cores() // n)
        pool = ProcessPoolExecutor(n, mp_context=context, initializer=begin_worker, initargs=(share,))
        try:
            with _inherit_no_interrupt():  # the first submissions start the workers
                pending = {pool.submit(run_packed, c.label, c.config.model_dump(), str(base)): c for c in cells}
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    cell = pending.pop(future)
                    error, folder = future.exception(), cell.folder(base)
                    said = future.result() if error is None else in_words(error)
                    yield Outcome(cell, folder, error=said or (None if finished(folder) else CHANGED))
        except BaseException:  # Ctrl-C, or a caller that wants no more: cells in mid-run have their checkpoints
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    return launch


@contextmanager
def _inherit_no_interrupt() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which a terminal sends to all of them; the parent deals with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(share: int) -> None:
    """Make a worker process keep to its share of the cores, and end when its parent does, even if that was killed."""
    grant_cores(share)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def run_packed(label: str, raw: dict[str, Any], base: str, share: int | None = None) -> str | None:
    """``run_cell`` with plain values, for another process, on so many cores; returns the error, if any."""
    if share is not None:
        grant_cores(share)
    return run_cell(Cell(label, check_config(raw)), Path(base)).error


def latest_data(settings: Settings) -> Pooled:
    """``load_pooled`` that reads a data set once for several runs after each other."""
    data = settings.data
    key = json.dumps([data.name, data.dir, settings.data_seed, data.options], sort_keys=True, default=str)
    if key not in _latest:
        _latest.clear()  # two at a time may be too many
        _latest[key] = load_pooled(settings)
    return _latest[key]


def run_cell(cell: Cell, base: Path) -> Outcome:
    """Run one cell in its folder, going on from its checkpoint if it was interrupted."""
    folder = cell.folder(base)
    try:
        config = changed(cell.config, {"run.folder": str(base), "run.name": folder.name})
        run(config, resume=True, load=latest_data)
    except Exception as error:  # memory may run out in one cell and suffice for the rest
        return Outcome(cell, folder, error=in_words(error))
    return Outcome(cell, folder)
