from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtail.errors import FedtailError
from fedtail.report import load_run, load_runs

Writer = Callable[..., Path]


def test_a_run_folder_is_read_back(run_folder: Writer) -> None:
    run = load_run(run_folder("a", method="fedcgnm", seed=3, n_rounds=5))
    assert (run.method, run.seed, run.rounds, run.finished) == ("fedcgnm", 3, 5, True)
    assert run.metric("macro_f1") == run.history[-1]["test"]["macro_f1"]
    assert run.label_map is not None and run.label_map.sum() == run.train_counts.sum()  # type: ignore[union-attr]
    assert run.weights.sum() == pytest.approx(1)
    rounds, loss = run.curve("train_loss")
    assert rounds.tolist() == [0, 1, 2, 3, 4] and loss[0] > loss[-1]
    assert run.rate_path().shape == (5, 4)
    assert (run.timings, run.seconds) == ([0.25] * 5, 1.25)


def test_an_interrupted_run_is_read_as_far_as_it_came(run_folder: Writer) -> None:
    folder = run_folder("a", n_rounds=4, asked=10)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "trai')
    run = load_run(folder)
    assert (len(run.history), run.rounds, run.finished) == (4, 10, False)
    assert run.metric("accuracy") == run.history[-1]["test"]["accuracy"]


def test_a_search_that_ended_early_is_a_finished_run(run_folder: Writer) -> None:
    """``fedtail tune`` stops when the rates are found; that is no run cut short."""
    run = load_run(run_folder("a", n_rounds=4, more={"run": {"rounds": 50}}))
    assert run.finished and (len(run.history), run.rounds) == (4, 50)


def test_the_copies_that_other_processes_of_a_run_leave_are_not_runs(run_folder: Writer) -> None:
    """Under torchrun every process writes a folder; the first one's is the run, the others' begin with a dot."""
    folder = run_folder("runs/a")
    run_folder("runs/.rank1/a")
    assert [r.folder for r in load_runs([folder.parent])] == [folder]


def test_metrics_that_are_not_recorded_are_nan(run_folder: Writer) -> None:
    run = load_run(run_folder("a", label_map=False, confusion=False))
    assert np.isnan(run.metric("no_such_metric"))
    assert run.label_map is None and run.confusion is None


def test_a_folder_of_runs_stands_for_its_runs_and_each_counts_once(run_folder: Writer, tmp_path: Path) -> None:
    first = run_folder("b")
    run_folder("a", seed=1)
    assert [r.folder.name for r in load_runs([first, tmp_path])] == ["b", "a"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "is not a folder"),
        (lambda p: p.mkdir(), "and contains none"),
        (lambda p: (p.mkdir(), (p / "history.jsonl").write_text("")), "has no config.toml"),
    ],
)
def test_what_is_not_a_run_is_named_in_one_line(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(FedtailError, match=words) as error:
        load_runs([tmp_path / "x"])
    assert str(tmp_path / "x") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.toml", "clients.json", "result.json", "history.jsonl"])
def test_a_damaged_file_is_named(name: str, run_folder: Writer) -> None:
    folder = run_folder("a")
    (folder / name).write_text("{ not valid\n{ at all\n")
    with pytest.raises(FedtailError, match=name):
        load_runs([folder])


def test_a_run_without_a_finished_round_cannot_be_reported(run_folder: Writer) -> None:
    folder = run_folder("a")
    (folder / "history.jsonl").write_text("")
    with pytest.raises(FedtailError, match="has not finished a round"):
        load_runs([folder])
