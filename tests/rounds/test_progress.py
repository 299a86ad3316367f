"""Progress inside a round, and the time that is left, on every engine."""

from __future__ import annotations

import time

import pytest

from fedtail import fit
from fedtail.rounds import progress
from fedtail.rounds.progress import Pace, Progress
from tests.conftest import blob_federation


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_every_engine_says_how_far_a_round_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "SETTLED", 0.0)
    said: list[Progress] = []
    fit(blob_federation(4), "mlp", path=path, rounds=12, lr="auto", batch_size=8, on_progress=said.append)
    assert {p.round for p in said} == set(range(12))
    for t in range(12):
        shares = [p.share for p in said if p.round == t]
        first = 1.0 if path == "batched" else 0.5  # which takes a stretch of steps in one call
        assert shares == sorted(shares) and shares[0] < first and shares[-1] == pytest.approx(1.0)
    assert said[0].left is None and "round 1/12, " in str(said[0]) and "left" not in str(said[0])
    assert all(p.left is not None and p.left >= 0 for p in said[1:]) and " left" in str(said[1])
    assert said[-1].left < said[1].left  # type: ignore[operator]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number, which is what the time is."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_race_is_not_taken_for_the_length_of_all_rounds(clock: list[float]) -> None:
    said: list[Progress] = []
    pace = Pace(11, said.append)
    pace.begin(0, 5)
    pace.advance(0.0)
    clock[0] = 10.0
    pace.advance(0.2)  # 50 s for a round of five values each, so 10 s for one of one
    assert said[-1].left == pytest.approx(40 + 10 * 10)
    clock[0] = 50.0
    pace.advance(0.8)
    pace.begin(1, 1)
    clock[0] = 55.0
    pace.advance(0.5)
    assert said[-1].left == pytest.approx(5 + 9 * 10)


def test_what_happens_once_at_the_start_is_not_taken_for_the_pace(clock: list[float]) -> None:
    said: list[Progress] = []
    pace = Pace(11, said.append)
    pace.begin(0, 1)
    clock[0] = 50.0
    pace.advance(0.01)
    assert said[-1].left is None, "one step in a hundred, most of it spent on what the first step needs"
    clock[0] += progress.SETTLED
    pace.advance(0.10)
    assert said[-1].left == pytest.approx(progress.SETTLED * (0.89 + 10) / 0.10)
