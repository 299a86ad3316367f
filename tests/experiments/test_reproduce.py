"""Every table and figure runs at smoke scale, from the command to the files it writes."""

import sys
from pathlib import Path

import pytest

from fedtail.cli import main
from fedtail.experiments.grid import grid_names

FIGURES = {n for n in grid_names() if n.startswith("fig-")}


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
    assert len(capsys.readouterr().out.splitlines()) == 3 * 17 * 3 and not list(tmp_path.iterdir())
