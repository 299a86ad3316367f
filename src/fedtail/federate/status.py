"""``server/run.json``: where the run stands, for ``fedtail deploy status``. One run at a time writes it."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError
from fedtail.files import write_atomically
from fedtail.rounds.history import influence_of
from fedtail.rounds.state import State
from fedtail.settings import Settings

LAST_ERRORS = 20
RUN_LOCK = "run.lock"
"""Locked by the process that trains for as long as it lives, beside ``run.json``."""


def follow(
    read: Callable[[], Mapping[str, Any]],
    tell: Callable[[dict[str, Any]], None],
    fault: Callable[[], str],
    *,
    silence: float = 5.0,
    timeout: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Wait for the end of a run that ``read`` tells of, and return the last that it says; each change is told.

    A run that dies says nothing: after ``silence`` seconds without a change ``fault`` is asked why, and an empty answer
    means that it is well. ``FedtailError`` for a run that failed or does not end in time.
    """
    began = heard = clock()
    last: dict[str, Any] = {}
    while True:
        now = dict(read())
        if now != last:
            last, heard = now, clock()
            tell(now)
        if now.get("state") == "failed":
            raise FedtailError(str(now["error"]))
        if now.get("state") == "finished":
            return now
        if clock() - heard > silence:
            if (why := fault()) and dict(read()) == last:
                raise FedtailError(why)
            heard = clock()
        if clock() - began > timeout:
            raise FedtailError(f"the run did not end within {timeout:g} s; see its logs")
        sleep(0.3)


class Status:
    """Kept up to date while a run goes on; as a context it also notes how the run failed."""

    def __init__(self, path: Path | None, config: Settings, run_id: int = 0) -> None:
        self.path = path
        self.now: dict[str, Any] = {"run": str(run_id), "state": "waiting for sites", "errors": []}
        self.now |= {"round": 0, "rounds": config.run.rounds}
        self.write()

    def start(self, folder: Path, done: int) -> None:
        sites = json.loads((folder / "clients.json").read_text())["sites"]  # by number: some may have left since
        self.write(state="training", folder=str(folder), round=done, sites=sites)

    def round(self, state: State, record: dict[str, Any], seconds: float) -> None:
        faults = [*record["refused"], *record.get("faults", [])]
        errors = [*self.now["errors"], *({"round": record["round"], **f} for f in faults)][-LAST_ERRORS:]
        found = influence_of(state.history, len(self.now["sites"])) if "influence" in record else {}
        outliers = {str(k): found["flagged"][k] + found["refused"][k] for k in found.get("outliers", [])}
        metrics = record.get("test") or record.get("validation") or {}
        watched = {"loss": record.get("train_loss"), "accuracy": metrics.get("accuracy")}
        known = {name: round(float(v), 4) for name, v in watched.items() if v is not None and math.isfinite(v)}
        self.write(round=state.round, seconds=round(seconds, 2), errors=errors, outliers=outliers, **known)

    def waiting(self, line: str) -> None:
        """Note whom the run waits for and why; nothing once it goes on."""
        self.write(waiting=line)

    def finish(self, folder: Path | None) -> None:
        self.write(state="finished", folder=str(folder))

    def write(self, **fields: Any) -> None:
        self.now |= {**fields, "time": time.time()}
        if self.path is not None:
            write_atomically(self.path, json.dumps(self.now, indent=1))

    def __enter__(self) -> Status:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SystemExit):  # how Flower ends a run that was stopped
            self.write(state="stopped")
        elif isinstance(error, FedtailError):
            self.write(state="failed", error=str(error))
        elif error is not None:
            lines = "".join(traceback.format_exception(error))
            self.write(state="failed", error=f"{type(error).__name__}: {error}", trace=lines)
