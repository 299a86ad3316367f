"""Following a run: told as it goes, and given up with one line when it dies. No test waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fedtail.errors import FedtailError
from fedtail.federate.status import follow


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def watched(said: Iterator[dict[str, Any]], fault: Iterator[str], **limits: float) -> tuple[list[str], Clock]:
    """States told, and the clock, of a run that says one thing after another, then the last for ever."""
    told: list[str] = []
    clock, last = Clock(), {}

    def read() -> dict[str, Any]:
        nonlocal last
        last = next(said, last)
        return last

    follow(read, lambda now: told.append(now["state"]), lambda: next(fault), clock=clock, sleep=clock.sleep, **limits)
    return told, clock


def run(*states: str) -> Iterator[dict[str, Any]]:
    return iter([{"state": state} for state in states])


def test_what_a_run_says_is_told_once_and_its_end_is_noticed() -> None:
    told, _ = watched(run("waiting", "training", "training", "finished"), iter(()))
    assert told == ["waiting", "training", "finished"]


def test_a_run_that_dies_in_silence_is_given_up_with_its_reason_and_one_that_is_well_is_waited_for() -> None:
    with pytest.raises(FedtailError, match="FAILED_TO_RUN"):
        watched(run("training"), iter(["", "", "Flower ended the run: FAILED_TO_RUN"]), silence=5.0)
    states = ["training"] * 60 + ["finished"]
    told, clock = watched(run(*states), iter([""] * 10), silence=5.0)
    assert told == ["training", "finished"] and clock.now > 15


def test_a_run_that_ends_while_its_fault_is_looked_for_has_ended_well() -> None:
    said, clock = {"state": "training"}, Clock()

    def fault() -> str:
        said["state"] = "finished"
        return "Flower ended the run"

    done = follow(lambda: said, lambda _: None, fault, clock=clock, sleep=clock.sleep)
    assert done == {"state": "finished"}


def test_a_failed_run_and_one_that_takes_too_long_are_one_line() -> None:
    with pytest.raises(FedtailError, match=r"^diverged$"):
        watched(iter([{"state": "failed", "error": "diverged"}]), iter(()))
    with pytest.raises(FedtailError, match="did not end within 60 s"):
        watched(run("training"), iter([""] * 100), silence=5.0, timeout=60.0)
