"""Runs that wait for their turn: ``server/queue``, one config per run, in the order in which they were put there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate import runs
from fedtail.files import write_atomically
from fedtail.runs.config import load_config
from fedtail.settings import Settings


def folder_of(deployment: Deployment) -> Path:
    return deployment.server / "queue"


def waiting(deployment: Deployment) -> list[tuple[int, Path]]:
    """(number, config) of the runs that wait, the next one first."""
    found = [(re.fullmatch(r"(\d+)\.toml", p.name), p) for p in folder_of(deployment).glob("*.toml")]
    return sorted((int(m[1]), p) for m, p in found if m)


def put(deployment: Deployment, config: Settings) -> int:
    """Let a run wait for its turn; returns its number."""
    queue = folder_of(deployment)
    queue.mkdir(mode=0o700, exist_ok=True)
    last = queue / "last"
    number = int(last.read_text()) + 1 if last.is_file() else 1  # a number is never used again
    write_atomically(queue / f"{number}.toml", runs.with_the_sites_data(deployment, config).to_toml())
    write_atomically(last, f"{number}\n")
    return number


def drop(deployment: Deployment, number: int) -> None:
    """Take a run out of the queue."""
    file = folder_of(deployment) / f"{number}.toml"
    if not file.is_file():
        known = ", ".join(str(n) for n, _ in waiting(deployment)) or "none"
        raise FedtailError(f"no run {number} in the queue of {deployment.shown}; queued: {known}")
    file.unlink()


def work(
    deployment: Deployment,
    on_change: Callable[[dict[str, Any]], None] | None = None,
    on_end: Callable[[int, str], None] | None = None,
) -> int:
    """Start one run after another until none waits; returns how many failed. One that fails does not hold up the rest.

    on_end: called with a run's number and its folder, or why it failed.
    """
    failed = 0
    while todo := waiting(deployment):
        number, file = todo[0]
        if runs.is_going_on(deployment):
            _follow_out(deployment, on_change)
        try:
            run_id = runs.start(deployment, load_config(file))
            file.unlink()
            outcome = str(runs.wait(deployment, run_id, on_change)["folder"])
        except FedtailError as error:
            if file.is_file():  # it was not started: the SuperLink is down, say
                raise
            failed, outcome = failed + 1, f"failed: {error}"
        if on_end is not None:
            on_end(number, outcome)
    return failed


def _follow_out(deployment: Deployment, on_change: Callable[[dict[str, Any]], None] | None) -> None:
    """Wait for a run that was started otherwise; how it ends is its own matter."""
    run_id = runs.last_run(deployment)
    try:
        if run_id is not None:
            runs.wait(deployment, run_id, on_change)
    except FedtailError:
        return
