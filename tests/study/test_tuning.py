"""Settings found within a time budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtail.cli import main
from fedtail.errors import FedtailError
from fedtail.runs.config import load_config
from fedtail.study.tuning import SPACE, Trial, Tuning, candidates, parse_budget, tune_settings

SMALL = ["data.name=blobs", "data.n_max=60", "data.clients=2", "run.rounds=9", "run.metric=macro_f1"]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), (" 2 m ", 120)])
def test_a_budget_is_a_time(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5m", "5 minutes", "soon"])
def test_what_is_no_time_is_one_line(text: str) -> None:
    with pytest.raises(FedtailError, match="not a time"):
        parse_budget(text)


def test_candidates_differ_and_leave_alone_what_was_said() -> None:
    settings = load_config(None, SMALL)
    points = candidates(settings, {"local.lr", "method.name"})
    assert len(points) == len(SPACE["rates.rate"]) * len(SPACE["method.weight_decay"]) * len(SPACE["local.batch_size"])
    assert len({json.dumps(p, sort_keys=True) for p in points}) == len(points)
    assert all("local.lr" not in p and "method.name" not in p for p in points)
    assert candidates(settings, set(SPACE)) == []
    assert not any("rates.rate" in p for p in candidates(settings, {"rates.name"}))
    assert points == candidates(settings, {"local.lr", "method.name"})


def test_the_best_is_looked_for_on_the_highest_rung() -> None:
    low, high = Trial({"a": 1}, 0, 3, 0.9, 1.0), Trial({"a": 2}, 1, 9, 0.7, 1.0)
    assert Tuning([low, high, Trial({"a": 3}, 1, 9, -np.inf, 1.0)]).best is high


def test_a_spent_budget_still_has_the_settings_as_given() -> None:
    settings = load_config(None, SMALL)
    found, tuning = tune_settings(settings, (), 1e-6)
    assert found == settings and len(tuning.trials) == 1


def test_candidates_are_halved_and_the_winner_is_in_the_settings(ticking: None) -> None:
    settings = load_config(None, [*SMALL, "local.lr=1e-5"])
    found, tuning = tune_settings(settings, set(SPACE) - {"local.lr"}, 60.0)
    assert [sum(t.rung == rung for t in tuning.trials) for rung in (0, 2)] == [5, 2]  # of 3 and of all 9 rounds
    assert found.local.lr in SPACE["local.lr"] and found.run.rounds == 9


def call(capsys: Any, monkeypatch: Any, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedtail", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_tune_writes_a_config_that_run_takes(capsys: Any, monkeypatch: Any, tmp_path: Path, ticking: None) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, "tune", *SMALL, "--method", "fedavg", "--budget", "2s")
    assert code == 0 and "fedtail run tuned.toml" in out and "s left" in err
    tuned = load_config(tmp_path / "tuned.toml")
    assert tuned.method.name == "fedavg" and tuned.run.select == "best"
    assert call(capsys, monkeypatch, "run", "tuned.toml", "-q")[0] == 0
    code, _, err = call(capsys, monkeypatch, "tune", *SMALL, "--budget", "2s")
    assert code == 2 and "exists" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "bad", [["--budget", "soon"], ["--budget", "5s", "--save", "x.json"], ["--budget", "5s", "--resume"]]
)
def test_bad_input_is_one_line(capsys: Any, monkeypatch: Any, tmp_path: Path, bad: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, "tune", *SMALL, *bad)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
