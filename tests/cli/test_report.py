from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedtail.cli import app
from fedtail.errors import FedtailError
from tests.run_folders import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for method in ("fedavg", "fedcgnm"):
        for seed in range(2):
            write_run(tmp_path / "runs" / f"{method}-{seed}", method=method, seed=seed, n_rounds=4)
    return tmp_path / "runs"


def call(*arguments: object) -> None:
    app([str(a) for a in arguments], standalone_mode=False)


def test_a_page_is_written_and_its_table_printed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call("report", runs, "--title", "Ours & theirs")
    assert "Ours &amp; theirs" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "FedCGNM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "word"), [("md", "| Method |"), ("latex", "\\toprule"), ("csv", "problem,method,seed")]
)
def test_tables_go_to_standard_output(form: str, word: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("report", runs, "--format", form)
    assert word in capsys.readouterr().out


def test_the_ending_of_out_tells_the_format(runs: Path, tmp_path: Path) -> None:
    call("report", runs, "--out", tmp_path / "deep" / "table.tex")
    assert "\\bottomrule" in (tmp_path / "deep" / "table.tex").read_text(encoding="utf-8")


def test_figures_go_to_a_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("report", runs, "--format", "svg", "--out", tmp_path / "figures")
    printed = capsys.readouterr().out.split()
    assert printed and all(Path(p).is_file() for p in printed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--format", "docx"), "format 'docx' is unknown"),
        (("--out", "table.xyz"), "add --format"),
        (("--metric", "macrof1"), "did you mean 'macro_f1'"),
        (("--baseline", "FedAvgg"), "did you mean 'FedAvg'"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], words: str, runs: Path) -> None:
    with pytest.raises(FedtailError, match=words) as error:
        call("report", runs, *arguments)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_run_exits_with_2_and_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedtail", "report", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
