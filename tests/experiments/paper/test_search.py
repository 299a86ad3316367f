from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.study.cells import Cell, Outcome
from fedtail_experiments.paper import search
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.page import table
from fedtail_experiments.paper.recipes import load_recipes, load_toml
from fedtail_experiments.paper.search import (
    COMPARED,
    Found,
    Trial,
    draw_trials,
    race,
    read_trials,
    reproduce_search,
    search_space,
    write_trials,
)


def fake(monkeypatch: pytest.MonkeyPatch, score) -> list[list[Cell]]:
    """A race without training: ``score`` of a config stands in for validation. Returns the cells of each rung."""
    rungs: list[list[Cell]] = []
    monkeypatch.setattr(search, "validation_score", lambda outcome, metric: score(outcome.cell.config))

    def run(cells):
        rungs.append(list(cells))
        return [Outcome(cell, Path()) for cell in cells]

    fake.run = run  # type: ignore[attr-defined]
    return rungs


def test_a_race_halves_its_field_and_the_best_of_the_last_rung_has_all_the_rounds(monkeypatch) -> None:
    rungs = fake(monkeypatch, lambda config: -abs(config.local.lr - 0.2) - config.local.batch_size / 1e4)
    trials = race("adult", "fedavg", [0, 1], fake.run)  # type: ignore[attr-defined]
    assert [len(cells) for cells in rungs] == [32, 16, 8]  # two seeds each
    assert [{cell.config.run.rounds for cell in cells} for cells in rungs] == [{13}, {25}, {50}]
    whole = [t for t in trials if t.rounds == 50]
    best = max(t.score for t in trials)
    assert len(whole) == 4 and max(t.score for t in whole) == best
    kept = sorted((t.score for t in trials if t.rounds == 13), reverse=True)[:8]
    assert sorted((t.score for t in trials if t.rounds == 25), reverse=True) == kept


def test_every_method_gets_the_same_points_in_what_it_shares_and_the_recipe_first() -> None:
    common = load_toml("search.toml")["common"]
    points = {m: draw_trials("adult", load_recipes()["adult"]["set"], m, search_space(m), 16) for m in COMPARED}
    shared = {m: [tuple(p[key] for key in common) for p in each] for m, each in points.items()}
    assert all(each == shared["fedavg"] and len(set(each)) == 16 for each in shared.values())
    assert points["fedcgnm"][0]["local.lr"] == 0.1 and points["fedcgnm"][0]["method.beta"] == 0.5
    assert len({p["method.beta"] for p in points["fedcgnm"]}) == 3


@pytest.mark.parametrize("method", sorted(load_toml("search.toml")["own"]))
def test_a_method_has_one_setting_of_its_own_with_allowed_values(method: str) -> None:
    ((key, values),) = load_toml("search.toml")["own"][method].items()
    assert METHODS.options(method)[key.partition(".")[2]] in values
    for value in values:
        METHODS.build(method, **{key.partition(".")[2]: value})


def test_all_compared_methods_but_fedavg_have_a_setting_of_their_own() -> None:
    assert set(COMPARED) - set(load_toml("search.toml")["own"]) == {"fedavg"}


def test_partitions_are_searched_one_by_one_and_a_failed_trial_loses(monkeypatch) -> None:
    fake(monkeypatch, lambda c: float("-inf") if c.local.lr > 0.05 else c.local.lr + (c.data.partition == "iid"))
    run = fake.run  # type: ignore[attr-defined]
    found = reproduce_search("cpu", 1, ["adult", "fedavg", "climb"], lambda recipe, cells: run(cells))
    assert [(f.key, f.method) for f in found] == [
        ("adult", "fedavg"),
        ("adult", "climb"),
        ("adult/dirichlet", "fedavg"),
        ("adult/dirichlet", "climb"),
    ]
    assert all(f.settings["local.lr"] == 0.05 for f in found)
    with pytest.raises(FedtailError, match="dirichlet"):
        reproduce_search("cpu", 1, ["dirichlett"], lambda recipe, cells: run(cells))


def test_tuned_settings_of_a_partition_hold_for_it_alone(monkeypatch) -> None:
    best = {"adult": {"fedavg": {"local.lr": 0.4}}, "adult/dirichlet": {"fedavg": {"local.lr": 0.05}}}
    monkeypatch.setattr("fedtail_experiments.paper.grid.load_tuned", lambda: best)
    words = ["Adult-10", "K=5", "FedAvg"]
    rates = {
        n: load_grid(n).cells("cpu", [0], words, True)[0][1].config.local.lr for n in ("table-iid", "table-noniid")
    }
    assert rates == {"table-iid": 0.4, "table-noniid": 0.05}


def test_trials_are_appended_once(tmp_path: Path) -> None:
    trial = Trial("fedavg", {"local.lr": 0.1}, 13, 0.912345678)
    found = Found(recipe="adult", partition="iid", method="fedavg", settings={}, score=0.9, trials=(trial,))
    for _ in range(2):
        write_trials(tmp_path / "results" / "trials.jsonl", [found])
    (line,) = (tmp_path / "results" / "trials.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "recipe": "adult",
        "partition": "iid",
        "method": "fedavg",
        "settings": {"local.lr": 0.1},
        "rounds": 13,
        "score": 0.91235,
    }
    (again,) = read_trials(tmp_path / "results" / "trials.jsonl")
    assert (again.key, again.tried, again.settings, again.score) == ("adult", 1, {"local.lr": 0.1}, 0.91235)
    assert "| adult | fedavg | 1 | 1 | 1 | lr 0.1 | .912 |" in table("searches", [], [again])


def test_a_search_over_more_seeds_stands_beside_the_one_over_fewer(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    for seeds, lr, score in ((1, 0.4, 0.95), (3, 0.1, 0.91)):
        trial = Trial("fedavg", {"local.lr": lr}, 50, score, seeds)
        write_trials(file, [Found("adult", "iid", "fedavg", {"local.lr": lr}, score, (trial,))])
    one, three = read_trials(file)
    assert (one.seeds, one.settings, three.seeds, three.settings) == (1, {"local.lr": 0.4}, 3, {"local.lr": 0.1})
    shown = table("searches", [], [three, one])
    assert shown.index("| 1 | 1 | 1 | lr 0.4 |") < shown.index("| 1 | 3 | 3 | lr 0.1 |")


def test_the_command_runs_a_small_race_and_writes_what_it_found(tmp_path: Path) -> None:
    asked = CliRunner().invoke(
        app, ["reproduce", "search", "--scale", "smoke", "--seeds", "1", "--only", "fedavg", "--out", str(tmp_path)]
    )
    assert asked.exit_code == 0, asked.output
    assert "smoke" in (tmp_path / "search" / "tuned.toml").read_text()
