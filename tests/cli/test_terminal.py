"""What the terminal says: whole numbers in 80 columns, how sure a tail accuracy is, which split, warnings under -q."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import fedtail as ft
from fedtail.cli import main
from fedtail.cli.data import show
from fedtail.cli.progress import RoundProgress, terminal
from fedtail.cli.run import CLASS, print_outcome
from fedtail.cli.tables import print_block
from fedtail.core.evidence import wilson
from fedtail.data.inspection import inspect
from fedtail.rates import FedHOO, Fixed, Uniform
from fedtail.report import load_run
from fedtail.report.blocks import Table
from fedtail.report.facts import found_and_missed
from fedtail.rounds.state import State
from fedtail.runs.config import load_config


@pytest.fixture(scope="module")
def result() -> Any:
    return ft.fit(ft.partition(ft.datasets.load("blobs", n_max=60), clients=3), rounds=1)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_number_is_cut_at_any_width(result: Any, tmp_path: Path, width: int, monkeypatch: Any) -> None:
    console = terminal(width=width, record=True, file=io.StringIO())
    for module in ("run", "tables"):
        monkeypatch.setattr(f"fedtail.cli.{module}.terminal", lambda: console)
    run = load_run(result.save(tmp_path / "a"))
    print_outcome(run)
    text = console.export_text()
    assert "…" not in text and f"{result.test['macro_f1']:.4f}" in text and "Majority" in text
    (found,) = found_and_missed(run, 1)
    assert str(found) in text
    if width >= 120:  # a rare class's recall comes with how sure it is
        low, high = wilson(found.found / found.support, found.support)
        assert f"({low:.2f} to {high:.2f})" in text


def test_a_title_wraps_before_a_number_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(width=80, record=True, file=io.StringIO())
    monkeypatch.setattr("fedtail.cli.tables.terminal", lambda: console)
    rows = [["in Ordnung", "745", "200", "7", "26", "0.885", "0.966", "0.968"]]
    print_block(Table([list(row) for row in rows], list(CLASS)))
    text = console.export_text()
    assert "PR-AUC" in text and all(number in text.split() for number in rows[0][1:])


def test_a_share_of_few_samples_is_not_sure() -> None:
    low, high = wilson(0.2407, 62)
    assert (round(low, 3), round(high, 3)) == (0.151, 0.360)
    assert wilson(0.5, 0) == (0.0, 1.0) and wilson(0.0, 10)[0] == 0.0


def test_the_progress_line_says_which_split_its_figures_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RoundProgress("x", 1, "fedtail run")
    progress.live = False
    state = State(1, ft.partition(ft.datasets.load("blobs", n_max=20), clients=1).pool.x[0])
    record = {"train_loss": 1.0, "searching": False, "refused": [], "validation": {"macro_f1": 0.5}}
    progress(state, record, 0.1)
    progress(state, {**record, "test": {"macro_f1": 0.25}}, 0.1)
    said = capsys.readouterr().err
    assert "validation macro F1 0.500" in said and "test macro F1 0.250" in said and "ETA" in said


def test_notes_are_printed_under_q_too(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    rows = [f"{i % 7},{'uv'[i % 2]},{i % 3}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,s,y", *rows]))
    table = ["--table", str(tmp_path / "t.csv"), "--label", "y", "--site", "s", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fedtail", "run", *table, "--rounds", "1", "-q"])
    with pytest.raises(SystemExit):
        main()
    err = capsys.readouterr().err
    assert "fewer than 100 training rows" in err and "round 1/1" not in err


def test_learning_rate_and_epochs_are_flags(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    fast = ["--dataset", "blobs", "data.n_max=30", "--rounds", "1", "-q", "--out", str(tmp_path), "--name", "a"]
    monkeypatch.setattr(sys, "argv", ["fedtail", "run", *fast, "--lr", "0.2", "--epochs", "2"])
    with pytest.raises(SystemExit):
        main()
    local = load_config(tmp_path / "a").local
    assert (local.lr, local.epochs) == (0.2, 2)
    monkeypatch.setattr(sys, "argv", ["fedtail", "run", *fast, "--lr", "fast"])
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "local.lr = 'fast'" in err[-1] and "'auto'" in err[-1]


def test_a_rate_above_one_is_warned_of() -> None:
    for make in (
        lambda: Uniform(2, 1.5),
        lambda: Fixed(2, [0.5, 1.2]),
        lambda: FedHOO(2, low=0.5, high=1.4),
    ):
        with pytest.warns(UserWarning, match="rare classes become the most frequent ones"):
            make()
    Fixed(2, [2.0, 3.0], searches="mu")


def test_many_sites_leave_the_class_names_in_the_inspection(capsys: pytest.CaptureFixture[str]) -> None:
    pool = ft.datasets.load("blobs", n_max=400)
    found = inspect(ft.partition(pool, clients=51, partition="iid"), 0.6, 2)
    show(found, width=80)
    out = capsys.readouterr().out
    assert all(name in out for name in map(str, found.federation.classes)) and "sites with it" in out


def test_a_federation_prints_as_a_short_table() -> None:
    few = ft.partition(ft.datasets.load("blobs", n_max=60), clients=3)
    assert len(repr(few).splitlines()) == 2 + 3 + 1 and "tensor" not in repr(few)
    many = ft.partition(ft.datasets.load("blobs", n_max=400), clients=60, partition="iid")
    assert len(repr(many).splitlines()) < 25
