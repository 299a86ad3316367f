"""Progress inside a round, and the time that is left, on every engine."""

from __future__ import annotations

import time

import pytest

from fedtail import fit
from fedtail.rounds import progress
from fedtail.rounds.progress import Pace, Progress, duration
from tests.conftest import blob_federation


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_every_engine_says_how_far_a_round_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "SETTLED", 0.0)
    monkeypatch.setattr(progress, "LITTLE", 0.0)
    said: list[Progress] = []
    fit(blob_federation(4), "mlp", path=path, rounds=12, lr="auto", batch_size=8, on_progress=said.append)
    assert {p.round for p in said} == set(range(12))
    for t in range(12):
        shares = [p.share for p in said if p.round == t]
        first = 1.0 if path == "batched" else 0.5  # which takes a stretch of steps in one call
        assert shares == sorted(shares) and shares[0] < first and shares[-1] == pytest.approx(1.0)
    assert all(p.left is not None and p.left >= 0 for p in said) and said[-1].left < said[0].left  # type: ignore[operator]
    assert "round 1/12, " in str(said[0]) and " left" in str(said[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number, which is what the time is."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_estimate_follows_from_the_first_client_and_a_race_is_not_taken_for_all_rounds(
    clock: list[float],
) -> None:
    said: list[Progress] = []
    pace = Pace(11, said.append)
    pace.begin(0, 5)
    clock[0] = 10.0
    pace.advance(0.2)  # 50 s for a round of five values each, so 10 s for one of one
    assert said[-1].left == pytest.approx(40 + 10 * 10)
    pace.end()
    pace.begin(1, 1)
    clock[0] = 12.0
    pace.advance(0.1)  # 12 s for 5.1 values
    assert said[-1].left == pytest.approx(12 / 5.1 * (0.9 + 9))


def test_what_happens_once_at_the_start_is_not_taken_for_the_pace(clock: list[float]) -> None:
    said: list[Progress] = []
    pace = Pace(11, said.append)
    pace.begin(0, 1)
    clock[0] = 5.0
    pace.advance(0.01)
    assert said[-1].left is None, "one step in a hundred, most of it spent on what the first step needs"
    clock[0] = 6.0
    pace.advance(0.10)
    assert said[-1].left == pytest.approx(6 / 0.11 * (0.89 + 10))
    slow = Pace(11, said.append)
    slow.begin(0, 1)
    clock[0] += progress.LONG
    slow.advance(0.01)
    assert said[-1].left is not None, "a round of an hour is said within a minute"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (40, "40 s"), (700, "12 min"), (12000, "3 h 20 min")])
def test_times_are_rounded_as_far_as_an_estimate_is(seconds: float, text: str) -> None:
    assert duration(seconds) == text
