"""Every table and figure runs at smoke scale, from the command to the files it writes."""

import sys
from pathlib import Path

import pytest

from fedtail.cli import main
from fedtail.runs.config import load_config
from fedtail_experiments.paper.declared import grid_names, load_grid

FIGURES = {n for n in grid_names() if load_grid(n).kind != "table"}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedtail", "reproduce", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that tables that share cells share their runs."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.slow
@pytest.mark.xdist_group("reproduce")
@pytest.mark.parametrize("name", [*grid_names(), "convergence"])
def test_every_entry_runs_at_smoke_scale(name: str, out: Path, monkeypatch, capsys) -> None:
    assert call(monkeypatch, name, "--scale", "smoke", "--seeds", "1", "--workers", "1", "--out", str(out)) == 0
    folder = out / name / "smoke"
    assert (folder / "table.md").read_text().count("|") > 5
    if name in FIGURES or name == "convergence":
        assert (folder / "figure.svg").read_text().lstrip().startswith("<?xml")
        assert (folder / "figure.png").stat().st_size > 5_000
    shown = capsys.readouterr().out
    assert "failed" not in shown and "nan" not in shown


def test_without_a_name_it_lists_what_there_is(monkeypatch, capsys) -> None:
    assert call(monkeypatch) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*grid_names(), "search", "convergence"])


def test_dry_run_lists_folders_and_runs_nothing(monkeypatch, capsys, tmp_path: Path) -> None:
    assert call(monkeypatch, "table-iid", "--only", "adult", "--dry-run", "--out", str(tmp_path)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 * 18 * 3 and not list(tmp_path.iterdir())


def test_settings_change_the_cells_that_have_them(monkeypatch, capsys, tmp_path: Path) -> None:
    table = ("table-iid", "--scale", "smoke", "--seeds", "1", "--workers", "1", "--out", str(tmp_path))
    assert call(monkeypatch, *table, "--only", "K=5", "--only", "FedCGNM", "rates.rate=0.8", "run.rounds=1") == 0
    assert "with rates.rate=0.8 run.rounds=1" in capsys.readouterr().out
    assert (tmp_path / "table-iid" / "smoke-rates.rate-0.8-run.rounds-1" / "table.md").is_file()
    uniform, fedhoo = (load_config(next(tmp_path.glob(f"cells/*-{row}-s0-*"))) for row in ("fedcgnm-u", "fedhoo"))
    assert uniform.rates.options["rate"] == 0.8 and "rate" not in fedhoo.rates.options
    assert uniform.run.rounds == fedhoo.run.rounds == 1


def test_options_of_a_model_that_the_data_chooses_can_be_set(monkeypatch, capsys, tmp_path: Path) -> None:
    table = ("table-iid", "--scale", "smoke", "--seeds", "1", "--workers", "1", "--out", str(tmp_path))
    only = ("--only", "K=5", "--only", "FedAvg", "--only", "C10-20")
    assert call(monkeypatch, *table, *only, "model.hidden=[8]") == 0
    assert load_config(next(tmp_path.glob("cells/*"))).model.options == {"hidden": [8]}
    assert call(monkeypatch, *table, *only, "model.stem=large") != 0  # not an option of the model it turns out to be
    assert "stem" in capsys.readouterr().err


def test_a_table_made_row_by_row_is_whole_in_the_end(monkeypatch, capsys, tmp_path: Path) -> None:
    table = ("table-iid", "--scale", "smoke", "--seeds", "1", "--workers", "1", "--out", str(tmp_path), "--only", "K=5")
    for row in ("FedAvg", "FedProx"):
        assert call(monkeypatch, *table, "--only", row) == 0
    shown, written = capsys.readouterr().out, (tmp_path / "table-iid" / "smoke" / "table.md").read_text()
    assert shown.count("FedAvg + U") == 1  # the second call shows what it was asked for
    assert [line.split(" |")[0] for line in written.splitlines()[2:]] == ["| FedAvg + U", "| FedProx + U"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-iid", "method.name=fedavg"], "two cells would be the same run"),
        (["table-iid", "method.betaa=0.5"], "did you mean 'method.beta'"),
        (["table-iid", "local.lr=-1"], "must be above 0"),
        (["table-iid", "run.seed=3"], "--seeds"),
        (["convergence", "local.lr=1"], "takes no settings"),
        (["local.lr=1"], "is a setting; give the name of a table or figure first"),
    ],
)
def test_settings_that_cannot_be_are_one_line(arguments, message, monkeypatch, capsys, tmp_path: Path) -> None:
    assert call(monkeypatch, *arguments, "--scale", "smoke", "--out", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_data_that_cannot_be_had_is_one_line_for_the_whole_table(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDTAIL_DATA", str(tmp_path / "none"))
    table = ("table-iid", "--scale", "full", "--only", "UNSW", "--device", "cpu", "--out", str(tmp_path / "out"))
    assert call(monkeypatch, *table) == 2
    error = capsys.readouterr().err
    assert "UNSW_NB15_training-set.csv" in error and error.count("\n") == 1
