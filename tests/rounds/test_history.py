"""History is small on disk for any number of clients, and comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtail.errors import FedtailError
from fedtail.rounds.checkpoint import load_checkpoint, save_checkpoint
from fedtail.rounds.history import history_line, history_text, influence_of, parse_history, parse_timings
from fedtail.rounds.state import State

values = st.lists(st.sampled_from([0.4, 0.6, 0.8]), min_size=2, max_size=2)


@given(st.lists(st.tuples(values, st.none() | values), max_size=8))
def test_every_round_comes_back_with_its_rates(rounds: list[tuple[list[float], list[float] | None]]) -> None:
    searches = bool(rounds) and rounds[0][1] is not None  # a run searches something else in all rounds or in none
    records: list[dict[str, Any]] = [
        {"round": t, "rates": rates, **({"searched": {"lr": lr or [0.1, 0.1]}} if searches else {})}
        for t, (rates, lr) in enumerate(rounds)
    ]
    assert parse_history(history_text(records), "history.jsonl") == records


def test_settled_rates_of_many_clients_are_written_once() -> None:
    rates = [0.6] * 10_000
    records = [{"round": t, "rates": rates} for t in range(20)]
    assert len(history_text(records)) < 1.1 * len(json.dumps(rates)) + 1000
    back = parse_history(history_text(records), "history.jsonl")
    assert all(r["rates"] is back[0]["rates"] for r in back), "rounds of equal rates share one list in memory"


def test_rates_that_return_to_an_earlier_value_are_written_again() -> None:
    records = [{"round": t, "rates": [r]} for t, r in enumerate((0.4, 0.6, 0.4))]
    assert [json.loads(line)["rates"] for line in history_text(records).splitlines()] == [[0.4], [0.6], [0.4]]


def test_a_file_with_rates_in_every_line_is_read_as_before() -> None:
    text = "".join(json.dumps({"round": t, "rates": [0.5]}) + "\n" for t in range(3))
    assert [r["rates"] for r in parse_history(text, "f")] == [[0.5]] * 3


def test_a_half_written_last_line_is_dropped_and_a_broken_one_before_it_is_named() -> None:
    whole = history_line({"round": 0, "rates": [0.5]})
    assert len(parse_history(whole + '{"round": 1, "ra', "f")) == 1
    with pytest.raises(FedtailError, match="f, line 1"):
        parse_history('{"rou\n' + whole, "f")


def test_timings_are_read_up_to_a_half_written_line() -> None:
    assert parse_timings("round,seconds\n0,0.5\n1,0.25\n2,", "t") == [0.5, 0.25]
    assert parse_timings("", "t") == []
    with pytest.raises(FedtailError, match="t, line 2"):
        parse_timings("round,seconds\n0\n1,0.25\n", "t")


def test_influence_comes_to_means_and_outliers() -> None:
    told = {"norm": [1.0, 2.0], "cosine": [0.5, None], "claimed": [0.5, 0.5], "weight": [0.5, 0.1], "share": [0.8, 0.2],
            "distance": [1.0, 9.0], "flagged": [2]}  # fmt: skip
    refused = [{"client": 1, "reason": "x", "code": "malformed"}, {"client": 3, "reason": "no reply", "code": "late"}]
    history = [{"clients": [0, 2], "influence": told, "refused": refused} for _ in range(4)]
    found = influence_of(history, 4)
    assert found["rounds"] == [4, 0, 4, 0] and found["flagged"] == [0, 0, 4, 0] and found["refused"] == [0, 4, 0, 4]
    assert found["outliers"] == [1, 2] and found["norm"] == [1.0, 0.0, 2.0, 0.0] and found["cosine"][2] == 0.0
    assert influence_of([{"clients": [0], "refused": []}], 1) == {}


def outliers(rounds: int, flagged: int = 0, malformed: int = 0) -> list[int]:
    """Who is an outlier, where client 1 is flagged in some of its rounds and sends what is malformed in others."""
    told = {name: [0.0, 0.0] for name in ("norm", "cosine", "claimed", "weight", "share", "distance")}
    history = [
        {
            "clients": [0, 1],
            "influence": {**told, "flagged": [1] if t < flagged else []},
            "refused": [{"client": 1, "reason": "x", "code": "malformed"}] if t < malformed else [],
        }
        for t in range(rounds)
    ]
    return influence_of(history, 2)["outliers"]


def test_an_outlier_was_flagged_in_half_of_its_rounds_and_three_times_at_least() -> None:
    assert outliers(6, flagged=3) == [1] and outliers(7, flagged=3) == []
    assert outliers(2, flagged=2) == [] and outliers(3, flagged=3) == [1]


def test_an_outlier_was_refused_in_a_third_of_all_rounds_and_three_times_at_least() -> None:
    assert outliers(9, malformed=3) == [1] and outliers(10, malformed=3) == []
    assert outliers(2, malformed=2) == [] and outliers(3, malformed=3) == [1]


def test_a_checkpoint_of_another_config_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    state = State(0, torch.zeros(2))
    save_checkpoint(tmp_path, state, {"local.lr": 0.1, "run.seed": 0})
    assert load_checkpoint(tmp_path, state.x, [], {"local.lr": 0.1, "engine.new": 1}) is not None
    with pytest.raises(FedtailError, match=r"local.lr \(0.1 before, 0.2 now\)"):
        load_checkpoint(tmp_path, state.x, [], {"local.lr": 0.2, "run.seed": 0})
