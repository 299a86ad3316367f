"""What reviewers asked for: candidates that are trained, FedHOO's controls, and what a search costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.rates import FedHOO, Uniform
from fedtail_experiments.paper.overview import studied
from fedtail_experiments.paper.studies import (
    STUDIES,
    Study,
    agreement,
    known_answer,
    measure_candidates,
    measure_controls,
    read_studies,
)


def test_a_summed_candidate_is_the_model_that_training_with_the_same_draws_gives() -> None:
    values = measure_candidates("digits-20", 0, "smoke")
    assert values["same_draws"] == 0.0  # all rewards of all candidates, to the last right answer
    assert values["distance"] > 0.0  # draws of their own do differ


def test_agreement_is_of_ranks_and_winners() -> None:
    summed, one, two = (np.array(v) for v in ([0.1, 0.4, 0.3, 0.2], [0.2, 0.5, 0.4, 0.3], [0.9, 0.3, 0.5, 0.7]))
    found = agreement(summed, one, two, summed)
    assert (found["rank"], found["winner"], found["lost"]) == (pytest.approx(1.0), 1.0, 0.0)
    assert found["rank_luck"] == pytest.approx(-1.0) and found["winner_luck"] == 0.0
    assert found["lost_luck"] == pytest.approx(0.6) and found["distance"] == pytest.approx(0.1)
    flat = np.full(4, 0.5)
    assert agreement(flat, one, two, flat)["rank"] == 0.0


def test_the_mean_rate_is_fedhoo_s_own_by_clients_sizes() -> None:
    values = measure_controls("digits-20", 1, "smoke")
    assert 0.4 <= values["rate"] <= 0.8 and values["spread"] >= 0.0
    assert {f"accuracy_{name}" for name in ("fedhoo", "mean_rate", "shuffled")} <= set(values)


def test_regret_falls_where_a_search_finds_the_best_rates() -> None:
    best = np.array([0.5, 0.7])
    searched = known_answer(FedHOO(2), best, 30, np.random.default_rng(0))
    fixed = known_answer(Uniform(2, 0.6), best, 30, np.random.default_rng(0))
    assert searched.shape == (30, 2)
    assert ((searched[-5:] - best) ** 2).mean() < ((fixed[-5:] - best) ** 2).mean() / 2


def test_the_command_measures_what_is_not_on_file_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(place: str, seed: int, scale: str) -> dict[str, float]:
        asked.append((place, seed))
        return {"x": 1.0 + seed}

    monkeypatch.setitem(STUDIES, "clients", (measure, ("K=2", "K=5")))
    words = ["reproduce", "studies", "--only", "clients", "--only", "K=2", "--out", str(tmp_path), "--seeds"]
    for seeds in ("1", "2"):
        assert CliRunner().invoke(app, [*words, seeds]).exit_code == 0
    assert asked == [("K=2", 0), ("K=2", 1)]
    assert [s.values["x"] for s in read_studies(tmp_path / "studies.jsonl")] == [1.0, 2.0]
    assert "is unknown" in str(CliRunner().invoke(app, [*words[:3], "nothing"]).exception)


def test_a_table_of_a_study_has_paired_differences_corrected_over_the_table() -> None:
    values = {"a": [0.5, 0.6, 0.7], "b": [0.4, 0.52, 0.58]}
    told = [Study("s", "here", i, {"a": a, "b": b}) for i, (a, b) in enumerate(zip(*values.values(), strict=True))]
    rows = [{"name": "a", "value": "a"}, *({"name": f"a - b {i}", "value": "a", "minus": "b"} for i in range(2))]
    lines = studied({"study": "s", "places": ["here", "nowhere"], "rows": rows}, told).splitlines()
    assert lines[0] == "|  | here |" and lines[2] == "| a | .600 ± .100 |" and lines[-1] == "| seeds | 3 |"
    # differences .10, .08, .12: t = 8.66 with 2 degrees of freedom, p .0131, twice that for two tests
    assert lines[3] == "| a - b 0 | +.100 ± .020 (p .026) |"
