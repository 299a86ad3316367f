"""The run folder: what a run leaves on disk, and nothing of how it is computed."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedtail.data.inspection import About
from fedtail.errors import FedtailError, writing
from fedtail.files import locked, read_json, write_atomically
from fedtail.rounds.history import history_line, history_text, plain
from fedtail.runs.config import first_difference, load_config
from fedtail.runs.record import read_timings
from fedtail.settings import Settings
from fedtail.version import VERSION


def run_name(settings: Settings) -> str:
    """Return the name of the run's folder: as set, or of what the run is made of."""
    parts = (part.name.rpartition(":")[2] for part in (settings.data, settings.method, settings.rates))
    return settings.run.name or f"{'-'.join(parts)}-s{settings.run.seed}"


def choose_folder(settings: Settings, resume: bool) -> Path:
    """The run's folder: new, or that of the interrupted run. Nothing existing is ever overwritten."""
    base, name = Path(settings.run.folder), run_name(settings)
    if not re.fullmatch(r"[\w.@=,+-]+(/[\w.@=,+-]+)*", name) or ".." in name:
        raise FedtailError(f"run.name = {name!r} is not a folder name; use letters, digits, '.', '_' and '-'")
    folder = base / name
    if not resume:
        if folder.exists() and settings.run.name is not None:
            raise FedtailError(
                f"{str(folder)!r} already exists; continue it with --resume, or choose another name (run.name=NAME)"
            )
        number = 2
        while folder.exists():
            folder, number = base / f"{name}-{number}", number + 1
    elif (folder / "config.toml").is_file():
        difference = first_difference(load_config(folder / "config.toml"), settings)
        if difference is not None:
            raise FedtailError(
                f"{str(folder)!r} was started with a different config: {difference}; revert that, or choose "
                "another name "
                "(run.name=NAME)"
            )
    return folder


@contextmanager
def claimed(settings: Settings, folder: Path, resume: bool) -> Iterator[Path]:
    """Make the chosen folder and keep other processes out of it: two that append to one history would spoil it.

    Where another run took the name meanwhile, a run without a name of its own gets the next one.
    """
    with writing(folder):
        while True:
            new = [p for p in (folder, *folder.parents) if not p.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=resume)
                break
            except FileExistsError:
                folder = choose_folder(settings, resume=False)
    try:
        with ExitStack() as held:
            try:
                held.enter_context(locked(folder, wait=False))
            except BlockingIOError:
                raise FedtailError(
                    f"{str(folder)!r} is being written by another process; wait for it, or choose another name "
                    "(run.name=NAME)"
                ) from None
            yield folder
    finally:
        for made in new:  # a run that came to nothing leaves nothing
            with suppress(OSError):
                made.rmdir()


def begin_folder(
    folder: Path, settings: Settings, about: About, titles: Mapping[str, Any], history: list[dict[str, Any]]
) -> None:
    """Write what is known before the first round, and cut history and timings to the rounds that count.

    ``titles``: how tables and reports call the method, the rate strategy and metrics of the user's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.toml", settings.to_toml())
    write_atomically(folder / "history.jsonl", history_text(history))
    kept = read_timings(folder)[: len(history)]
    write_atomically(folder / "timings.csv", "round,seconds\n" + "".join(f"{i},{s:.4f}\n" for i, s in enumerate(kept)))
    clients = {**clients_of(about, titles), "made": read_json(folder / "clients.json").get("made") or provenance()}
    write_atomically(folder / "clients.json", json.dumps(plain(clients)))


def clients_of(about: About, titles: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``clients.json`` says of the data, with nothing of the data itself."""
    clients: dict[str, Any] = {
        "sites": about.sites,
        "classes": about.classes,
        "sizes": about.sizes,
        "validation_sizes": about.validation_sizes,
        "test_size": 0 if about.test_counts is None else int(about.test_counts.sum()),
        "notes": about.notes,
        "titles": titles,
        **({"encoder": about.encoder} if about.encoder else {}),
        **({"digest": about.digest} if about.digest else {}),
    }
    if about.label_map is not None:
        clients |= {"train_counts": about.label_map.sum(0), "label_map": about.label_map}
    return clients


def end_folder(
    folder: Path,
    settings: Settings,
    about: About,
    history: Sequence[Mapping[str, Any]],
    outcome: Mapping[str, Any],
) -> None:
    """Write the rate trajectories, those of anything else that was searched, and ``result.json``.

    A trajectory has a row for the first round and for every round in which a value changed.
    """
    write_atomically(folder / "rates.csv", _trajectories(about, [(r["round"], r["rates"]) for r in history]))
    for name in {key for r in history for key in r.get("searched", {})}:
        rows = [(r["round"], r["searched"][name]) for r in history]
        write_atomically(folder / f"{name}.csv", _trajectories(about, rows))
    result = {
        "name": folder.name,
        "seed": settings.run.seed,
        "data": about.name,
        "method": settings.method.name,
        "rates_strategy": settings.rates.name,
        **outcome,
        "seconds": sum(read_timings(folder)),
        "hardware": hardware(),
    }
    write_atomically(folder / "result.json", json.dumps(plain(result), indent=1))


def _trajectories(about: About, rows: Sequence[tuple[int, Sequence[float]]]) -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["round", *about.sites])
    last: Sequence[float] | None = None
    for t, values in rows:
        if values != last:
            writer.writerow([t, *values])
        last = values
    return table.getvalue()


def provenance() -> dict[str, str]:
    """Return when, by which version and command, and at which commit of the working folder a run was begun."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    out = {"date": now, "version": VERSION, "command": command}
    with suppress(OSError, subprocess.SubprocessError):
        ask = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(ask, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        out |= {"commit": commit} if commit else {}
    return out


def hardware() -> dict[str, Any]:
    """What the run ran on."""
    out: dict[str, Any] = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    with suppress(OSError, StopIteration):  # the last bits of a float depend on it
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        out["cpu"] = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
    return out


def append_round(folder: Path, history: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Add the last round of ``history`` to the files of history and timings."""
    record, before = history[-1], history[-2] if len(history) > 1 else None
    _append(folder / "history.jsonl", history_line(record, before))
    _append(folder / "timings.csv", f"{record['round']},{seconds:.4f}\n")


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
