"""Every bad value: one line that names key, value, what is allowed and the nearest spelling; exit code 2."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedtail as ft
import fedtail_command
from fedtail.cli import main
from fedtail.cli.progress import RoundProgress
from fedtail.errors import FedtailError
from fedtail.rounds.state import State
from fedtail.runs.config import load_config

FAST = ["--dataset", "blobs", "data.n_max=40", "--clients", "2", "--rounds", "2"]


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedtail", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.parametrize("group", [[], ["data"], ["deploy"]], ids=["fedtail", "data", "deploy"])
def test_a_bare_group_shows_its_commands(group: list[str], capsys, monkeypatch) -> None:
    _, out, err = call(capsys, monkeypatch, *group)
    assert "Commands" in out and "error" not in err


def test_a_list_of_names_may_be_typed_with_commas() -> None:
    config = load_config(None, ["run.diagnostics=alignment,influence"])
    assert config.run.diagnostics == ("alignment", "influence")
    assert load_config(None, ['run.diagnostics=["influence"]']).run.diagnostics == ("influence",)
    unquoted = load_config(None, ["run.diagnostics=[influence, alignment]"])  # what a shell leaves of the quotes
    assert unquoted.run.diagnostics == ("influence", "alignment")


def test_a_full_disk_is_one_line(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/history.jsonl")

    monkeypatch.setattr("fedtail.runs.execution.append_round", full)
    code, _, err = call(capsys, monkeypatch, "run", *FAST, "-q")
    assert code == 2 and err == "error: runs/x/history.jsonl: No space left on device\n"


def test_broken_toml_names_file_and_line(capsys, monkeypatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[run]\nrounds = = 3\n")
    code, _, err = call(capsys, monkeypatch, "run", str(bad))
    assert code == 2 and "bad.toml" in err and "line 2" in err


def test_debug_shows_the_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedtail", "run", "--method", "x", "--debug"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_json_is_the_last_line_of_standard_output_and_progress_goes_to_standard_error(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    code, out, err = call(capsys, monkeypatch, "run", *FAST, "--out", str(tmp_path), "--json")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert Path(last["run"]).is_dir()
    assert {"accuracy", "balanced_accuracy", "macro_f1", "weighted_f1", "head", "medium", "tail", "many", "few"} <= set(
        last
    )
    assert "round" in err and "macro F1" in err and "ETA" in err


def test_a_stopped_run_names_the_command_that_goes_on(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    whole = RoundProgress.__call__

    def stop(self: RoundProgress, state: State, record: dict[str, Any], seconds: float) -> None:
        whole(self, state, record, seconds)
        if state.round == 1:
            raise KeyboardInterrupt

    (tmp_path / "runs" / "blobs-fedcgnm-uniform-s0").mkdir(parents=True)  # the plain name is taken
    monkeypatch.setattr(RoundProgress, "__call__", stop)
    code, out, err = call(capsys, monkeypatch, "run", *FAST)
    said, _, command = err.splitlines()[-1].partition("; resume with: fedtail ")
    assert code == 130 and out == "" and said == "stopped: 1 of 2 rounds done"
    monkeypatch.setattr(RoundProgress, "__call__", whole)
    code, out, err = call(capsys, monkeypatch, *command.split())
    assert code == 0 and "round 2/2" in err and "round 1/2" not in err
    assert "runs/blobs-fedcgnm-uniform-s0-2" in out


def test_naming_another_method_keeps_only_the_options_it_has(capsys, monkeypatch, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[method]\nname = "fedcgnm"\nbeta = 0.9\nweight_decay = 0.001\n')
    code, _, _ = call(
        capsys,
        monkeypatch,
        "run",
        str(config),
        *FAST,
        "--method",
        "fedavg",
        "--out",
        str(tmp_path),
        "--name",
        "a",
        "-q",
    )
    assert code == 0
    saved = (tmp_path / "a" / "config.toml").read_text()
    assert "beta = 0.9" not in saved and "weight_decay = 0.001" in saved


def test_resume_says_when_there_was_nothing_to_go_on_from(capsys, monkeypatch, tmp_path: Path) -> None:
    arguments = ("run", "--name", "new", "--out", str(tmp_path), "--rounds", "1", "--resume")
    code, _, err = call(capsys, monkeypatch, *arguments)
    assert code == 0 and f"nothing to resume in {tmp_path / 'new'}" in err
    assert "nothing to resume" not in call(capsys, monkeypatch, *arguments)[2]


def test_a_run_folder_is_a_config_and_resume_continues_it(capsys, monkeypatch, tmp_path: Path) -> None:
    assert call(capsys, monkeypatch, "run", *FAST, "--out", str(tmp_path), "--name", "a", "-q")[0] == 0
    code, out, _ = call(capsys, monkeypatch, "run", str(tmp_path / "a"), "--resume", "--json", "-q")
    assert code == 0 and json.loads(out.splitlines()[-1])["run"] == str(tmp_path / "a")


def test_names_that_look_like_markup_are_printed_as_they_are(capsys, monkeypatch, tmp_path: Path) -> None:
    cells = [(i % 7, i % 9 + 1, ("[/s]", ":smile:")[i % 2], ("ok", "[red]")[i % 7 > 0]) for i in range(90)]
    rows = [f"{weight},2024-01-0{day},{site},{label}" for weight, day, site, label in cells]
    (tmp_path / "t.csv").write_text("\n".join(["weight [kg],day [/utc],site,y [/a]", *rows]))
    table = ("--table", str(tmp_path / "t.csv"), "--label", "y [/a]", "--site", "site")
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, monkeypatch, "run", *table, "--rounds", "1", "--name", "r")
    assert code == 0 and "left out: 'day [/utc]'" in err
    code, out, _ = call(capsys, monkeypatch, "tune", *table, "--rounds", "1", "-q")
    assert code == 0 and "[/s]" in out and ":smile:" in out
    code, _, err = call(capsys, monkeypatch, "predict", "--run", "runs/r", "t.csv", "--out", "new/p.csv")
    assert code == 0 and "[red]" in err and (tmp_path / "new" / "p.csv").is_file()
    code, out, _ = call(capsys, monkeypatch, "data", "inspect", *table)
    assert code == 0 and "[red]" in out and ":smile:" in out


def test_progress_leaves_out_what_is_not_known(capsys) -> None:
    progress = RoundProgress("t", 1, "fedtail run")
    state = State(1, torch.zeros(1), {}, [])
    record = {"train_loss": 0.5, "test": {"macro_f1": 0.25, "tail": float("nan")}, "searching": False, "refused": []}
    progress(state, record, 0.1)
    assert "loss 0.500  test macro F1 0.250  ETA" in capsys.readouterr().err


def test_a_narrow_terminal_shows_a_row_per_metric(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = call(capsys, monkeypatch, "run", *FAST, "--out", str(tmp_path), "-q")
    assert code == 0 and "Balanced acc." in out and "…" not in out


def test_an_output_without_unicode_does_not_end_a_finished_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedtail", "run", *FAST, "--out", str(tmp_path), "-q"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Majority only" in done.stdout and done.stderr == ""


def test_ctrl_c_while_torch_is_imported_shows_no_traceback(capsys, monkeypatch) -> None:
    class Slow(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "fedtail.cli", Slow("fedtail.cli"))
    with pytest.raises(SystemExit) as stop:
        fedtail_command.main()
    assert stop.value.code == 130 and capsys.readouterr().err == "stopped\n"


def test_a_table_too_small_to_compare_models_is_refused_with_what_to_set_and_leaves_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.csv").write_text("a,y\n1,no\n2,yes\n")
    small = ["run", "--table", "two.csv", "--label", "y", "--clients", "2", "--rounds", "2", "-q"]
    code, _, err = call(capsys, monkeypatch, *small)
    assert code == 2 and "needs validation data, but the clients have none; add rows" in err
    said = err.strip().splitlines()[-1]
    assert said.endswith("set run.select=last run.patience=0 decision.goal=argmax") and not Path("runs").exists()
    code, *_ = call(capsys, monkeypatch, *small, *said.rpartition("set ")[2].split())
    assert code == 0


@pytest.mark.parametrize("name", ["FedCGNM", "fedCGNM", "Fed-CGNM"])
def test_a_method_is_known_by_the_name_that_tables_have(name: str) -> None:
    assert load_config(None, [f"method.name={name}", "method.beta=0.7"]).method.name == "fedcgnm"
    assert load_config(None, ["method.name=Logit adjustment", "rates.name=FedHOO"]).rates.name == "fedhoo"
    pool = ft.datasets.load("blobs", n_max=30)
    assert ft.fit(ft.partition(pool, clients=2), method=name, rounds=1).settings.method.name == "fedcgnm"


def test_two_letters_swapped_are_the_likeliest_slip() -> None:
    with pytest.raises(FedtailError, match="did you mean 'fedcgnm'"):
        load_config(None, ["method.name=fedcgmn"])


@pytest.mark.parametrize("words", [["run", "--method", "nope"], ["run", "--nope"], ["compare", "--methods", "nope"]])
def test_an_error_is_an_object_too_where_json_is_asked_for(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedtail", *words, "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    said = json.loads(out.splitlines()[-1])["error"]
    assert stop.value.code == 2 and err == f"error: {said}\n" and "nope" in said
