"""``fedtail tune``: search, save, use."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.test_errors import call

SMALL = ["--dataset", "blobs", "data.n_max=40", "--clients", "2", "-q"]


def test_rates_that_were_found_are_saved_and_used(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    search = ["rates.cold_rounds=0", "rates.max_rounds=3"]
    code, out, _ = call(capsys, monkeypatch, "tune", *SMALL, *search, "--save", "found.toml", "--json")
    told = json.loads(out.splitlines()[-1])
    assert code == 0 and told["rounds"] == 3 and told["finished"]
    section = tomllib.loads(Path("found.toml").read_text())["rates"]
    assert section["name"] == "fixed" and section["rates"] == told["rates"] and len(section["rates"]) == 2
    code, out, _ = call(capsys, monkeypatch, "run", *SMALL, "--rounds", "2", "--rates", "found.toml", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["rates"] == section["rates"]


def test_a_searched_learning_rate_is_saved_with_what_it_is(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    what = ["rates.searches=lr", "rates.low=0.01", "rates.high=0.4", "rates.log=true", "rates.max_rounds=2"]
    call(capsys, monkeypatch, "tune", *SMALL, *what, "--save", "lr.json")
    section = json.loads(Path("lr.json").read_text())["rates"]
    assert section["searches"] == "lr" and section["base_rate"] == [0.6, 0.6]
    code, _, _ = call(capsys, monkeypatch, "run", *SMALL, "--rounds", "2", "--rates", "lr.json", "--name", "used")
    record = json.loads((tmp_path / "runs/used/history.jsonl").read_text().splitlines()[0])
    assert code == 0 and record["searched"]["lr"] == section["rates"]
    assert (tmp_path / "runs/used/lr.csv").read_text().startswith("round,client 0,client 1\n0,")


def test_the_table_names_every_client_and_the_command_that_uses_the_rates(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, monkeypatch, "tune", *SMALL, "--rates", "fast", "--rounds", "2")
    assert code == 0 and "client 0" in out and "client 1" in out
    assert "the search has not finished" in out and "fedtail run --rates runs/" in out


def test_an_interrupted_search_goes_on(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    search = ["rates.cold_rounds=1", "rates.max_rounds=4", "--name", "it", "--json"]
    _, first, _ = call(capsys, monkeypatch, "tune", *SMALL, *search)
    code, again, _ = call(capsys, monkeypatch, "tune", *SMALL, *search, "--resume")
    assert code == 0 and first == again


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", *SMALL, "--rates", "uniform"], ["'uniform' does not search", "fedhoo"]),
        (["tune", *SMALL, "--save", "rates.yaml"], ["--save 'rates.yaml'", ".toml or .json"]),
        (["run", *SMALL, "--rates", "nowhere.toml"], ["nowhere.toml", "fedtail tune"]),
        (["run", *SMALL, "--rates", "fedhoo", "run.participation=0.5"], ["participation = 0.5", "fedhoo_clusters"]),
        (["run", *SMALL, "--rates", "fedhoo", "run.validate_on=server"], ["no longer a setting", "data.holdout"]),
        (["run", *SMALL, "--rates", "fedhoo", "rates.searches=betta"], ["rates.searches", "did you mean 'beta'"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(tmp_path, capsys, monkeypatch, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, monkeypatch, *arguments)
    assert code == 2 and err.count("\n") == 1 and all(word in err for word in words)
    assert not (tmp_path / "runs").exists()
