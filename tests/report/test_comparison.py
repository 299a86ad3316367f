from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtail.errors import FedtailError
from fedtail.report import load_run, load_runs
from fedtail.report.comparison import comparisons
from fedtail.report.facts import at_sites

Writer = Callable[..., Path]


def labels(folders: list[Path]) -> list[list[str]]:
    return [[a.label for a in p.contenders] for p in comparisons(load_runs(folders))]


def test_titles_travel_with_the_run_and_names_stand_in_for_them(run_folder: Writer) -> None:
    mine, old = run_folder("mine"), run_folder("old", method="fedavg")
    result = json.loads((mine / "result.json").read_text())
    (mine / "result.json").write_text(json.dumps({**result, "titles": {"method": "My method", "rates": "U"}}))
    result = json.loads((old / "result.json").read_text())
    result.pop("titles")
    (old / "result.json").write_text(json.dumps(result))
    assert labels([mine, old]) == [["My method", "fedavg"]]


def test_seeds_of_a_method_are_one_arm(run_folder: Writer) -> None:
    folders = [run_folder(f"{m}{s}", method=m, seed=s) for s in range(3) for m in ("fedcgnm", "fedavg")]
    (comparison,) = comparisons(load_runs(folders))
    assert [a.label for a in comparison.contenders] == ["FedCGNM", "FedAvg"]
    assert [len(a.runs) for a in comparison.contenders] == [3, 3]
    assert comparison.reference.label == "FedAvg"


def test_rates_are_named_only_where_they_differ(comparison: list[Path]) -> None:
    assert labels(comparison) == [["FedAvg + U 0.6", "FedCGNM + FedHOO"]]
    assert labels(comparison[:3]) == [["FedAvg"]]


def test_any_other_setting_that_differs_is_named(run_folder: Writer) -> None:
    folders = [run_folder(f"b{b}", method="fedcgnm", more={"method": {"beta": b}}) for b in (0.5, 0.9)]
    assert labels([*folders, run_folder("a")]) == [["FedCGNM, beta 0.5", "FedCGNM, beta 0.9", "FedAvg"]]


def test_the_engine_makes_no_arm(run_folder: Writer) -> None:
    folders = [run_folder(f"r{s}", seed=s, more={"engine": {"name": f"engine{s}"}}) for s in range(2)]
    assert labels(folders) == [["FedAvg"]]


def test_runs_on_different_data_are_not_compared(run_folder: Writer) -> None:
    folders = [run_folder(f"a{a}", more={"data": {"alpha": a}}) for a in (0.1, 0.5)]
    assert [p.title for p in comparisons(load_runs(folders))] == [
        "blobs · 4 clients · dirichlet 0.1",
        "blobs · 4 clients · dirichlet 0.5",
    ]


@pytest.mark.parametrize("path", ["plants/sites", "plants/sites/*.csv"])
def test_tables_of_several_sites_are_called_by_their_folder(run_folder: Writer, path: str) -> None:
    folder = run_folder("a", more={"data": {"name": "site_tables", "path": path}})
    (found,) = comparisons(load_runs([folder]))
    assert found.title.startswith("sites · ")


def test_data_of_ones_own_are_called_by_their_file_or_folder(run_folder: Writer) -> None:
    folder = run_folder("a", more={"data": {"name": "table", "path": "here/crashes.csv"}})
    assert comparisons(load_runs([folder]))[0].title.startswith("crashes · 4 clients")


def test_sites_are_shown_by_the_split_that_the_run_names_even_if_a_tiny_site_has_no_test_rows(
    run_folder: Writer,
) -> None:
    folder = run_folder("a")
    score = {"macro_f1": 0.5, "per_class_support": [3, 1]}
    sites = [
        {"site": "a", "test": score, "validation": score},
        {"site": "tiny", "validation": {**score, "macro_f1": 0.1}},
    ]
    path = folder / "result.json"
    found = json.loads(path.read_text()) | {"sites": sites, "worst": {"split": "test", "site": "a", "value": 0.5}}
    path.write_text(json.dumps(found))
    split, rows = at_sites(load_run(folder))
    assert split == "test" and [row.name for row in rows] == ["a"]


def test_the_same_settings_with_other_classes_are_not_compared(run_folder: Writer) -> None:
    folders = [run_folder("a", n_classes=6), run_folder("b", method="fedcgnm", n_classes=4)]
    assert labels(folders) == [["FedAvg"], ["FedCGNM"]]


def test_a_seed_run_twice_is_counted_once_and_said(run_folder: Writer) -> None:
    (comparison,) = comparisons(load_runs([run_folder("a"), run_folder("b")]))
    assert [r.folder.name for r in comparison.contenders[0].runs] == ["b"]
    assert "more than once" in comparison.notes[0]


def test_the_baseline_can_be_chosen_and_a_wrong_one_is_refused(comparison: list[Path]) -> None:
    runs = load_runs(comparison)
    assert comparisons(runs, "FedCGNM + FedHOO")[0].reference.label == "FedCGNM + FedHOO"
    with pytest.raises(FedtailError, match="did you mean 'FedCGNM \\+ FedHOO'"):
        comparisons(runs, "FedCGNM+FedHOO")
