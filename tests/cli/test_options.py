"""Flags are declared once: every command that has one means the same by it, and its help says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from typer.main import get_command

from fedtail.cli import app, main
from fedtail.cli.lazy import COMMANDS as ALL_COMMANDS
from fedtail.cli.lazy import load, said_of
from fedtail.cli.options import FLAGS, config_values
from fedtail.errors import FedtailError
from fedtail.runs.build import build_federation
from fedtail.runs.config import load_config
from fedtail.settings import Settings

COMMANDS = {name: load(name) for name in ("run", "tune", "compare")}


@pytest.mark.parametrize("name", [n for n, flag in FLAGS.items() if flag.key])
def test_every_flag_sets_a_key_that_the_config_has(name: str) -> None:
    section, _, key = FLAGS[name].key.partition(".")
    assert key in type(getattr(Settings(), section)).model_fields


def test_commands_that_share_a_flag_take_the_same_type() -> None:
    for command in COMMANDS.values():
        own = {"out"} if command.name == "compare" else set()  # a folder for runs, tables and a page
        shared = {p.name: p for p in command.params if p.name in FLAGS and p.name not in own}
        assert {"dataset", "table", "tables", "images", "label", "site", "schema", "rates", "rounds"} <= set(shared)
        for name, parameter in shared.items():
            assert parameter.type.name == {str: "text", int: "integer", float: "float"}[FLAGS[name].kind]


@pytest.mark.parametrize("command", [["run"], ["tune"], ["compare"], ["data", "inspect"]], ids=" ".join)
def test_help_explains_arguments_and_groups_flags(command: list[str]) -> None:
    text = CliRunner(env={"COLUMNS": "120"}).invoke(get_command(app), [*command, "--help"]).output
    assert "then overrides" in text and "Data set by name" in text and "─ Data ─" in text
    assert "flags" not in text.split("Arguments")[1].split("Options")[0], "the shared flags stand in its place"


def test_flags_that_are_not_given_set_nothing() -> None:
    assert config_values(dict.fromkeys(FLAGS)) == {}
    given = {"rates": "0.4", "clients": 3, "label": "y", "table": "t.csv", "seed": 0}
    assert config_values(given) == {
        "data.name": "table", "data.path": "t.csv", "data.label": "y", "rates.name": "uniform", "rates.rate": 0.4,
        "data.clients": 3, "run.seed": 0,
    }  # fmt: skip


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    (tmp_path / "sites").mkdir()
    for name in ("north", "south"):
        frame = pd.DataFrame({"heat": range(60), "fault": ["no", "no", "yes"] * 20})
        frame.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    (tmp_path / "schema.toml").write_text(
        'label = "fault"\nclasses = ["no", "yes"]\n[[columns]]\nname = "heat"\nkind = "numeric"\n'
    )
    return tmp_path


@pytest.mark.parametrize("kind", ["tables", "table"])
def test_a_schema_names_the_label(kind: str, tables: Path) -> None:
    source = {"tables": tables / "sites", "table": tables / "sites" / "north.csv"}[kind]
    schema = str(tables / "schema.toml")
    for overrides, flags in (
        ([], {kind: str(source), "schema": schema}),
        ([f"data.schema={schema}"], {kind: str(source)}),
    ):
        config = load_config(None, [*overrides, "data.clients=2"], config_values(flags))
        assert build_federation(config).classes == ("no", "yes")
    config = load_config(None, [], config_values({kind: str(source), "schema": schema, "label": "heat"}))
    with pytest.raises(FedtailError, match=r"data\.label = 'heat', but the schema's label is 'fault'"):
        build_federation(config)


@pytest.mark.parametrize("command", [["run"], ["tune"], ["compare"], ["data", "inspect"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["tables", "table"])
def test_without_label_and_schema_one_line_says_what_is_missing(
    command: list[str], kind: str, tables: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tables)
    source = {"tables": "sites", "table": "sites/north.csv"}[kind]
    monkeypatch.setattr(sys, "argv", ["fedtail", *command, f"--{kind}", source])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and len(err.splitlines()) == 1
    assert "--label" in err and "--schema" in err
    assert not (tables / "runs").exists()


def test_commands_that_do_not_need_heavy_packages_do_not_pay_for_them() -> None:
    heavy = ("sklearn", "matplotlib", "scipy.stats", "flwr", "ray", "torch._dynamo", "tensorboard")
    program = f"import fedtail.cli, sys; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_needs_neither_torch_nor_numpy_and_few_modules() -> None:
    program = (
        "import sys; sys.argv = ['fedtail', '--help']\n"
        "from fedtail_command import main\n"
        "try: main()\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules], len(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, modules = found.stdout.splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]" and int(modules) < 500
    assert all(name in found.stdout for name in ALL_COMMANDS)


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_what_help_lists_is_what_a_command_says_of_itself(name: str) -> None:
    assert said_of(name).split() == (load(name).help or "").split() != []


def test_a_shell_completes_commands_without_importing_them() -> None:
    environment = {**os.environ, "_FEDTAIL_COMPLETE": "complete_bash", "COMP_WORDS": "fedtail re", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['fedtail']; from fedtail_command import main; main()"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert found.stdout.split() == ["report", "recalibrate", "reproduce"]


@pytest.mark.parametrize("clients", [["--clients", "5"], ["data.clients=2"]])
def test_other_clients_than_the_data_has_itself_are_refused(capsys, monkeypatch, tmp_path: Path, clients) -> None:
    rows = pd.DataFrame({"a": [i % 7 for i in range(60)], "y": [0, 1] * 30, "s": ["u", "v", "w"] * 20})
    rows.to_csv(tmp_path / "t.csv", index=False)
    table = ["--table", str(tmp_path / "t.csv"), "--label", "y", "--site", "s", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fedtail", "run", *table, *clients])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and sorted(p.name for p in tmp_path.iterdir()) == ["t.csv"]
    said = capsys.readouterr().err
    assert f"data.clients = {clients[-1][-1]} has no effect: 't' has 3 sites of its own" in said
    assert "leave it out, or have sites made up with data.partition=dirichlet" in said


def test_the_number_of_sites_may_be_said_and_a_run_goes_on_without_it(monkeypatch, tmp_path: Path) -> None:
    rows = pd.DataFrame({"a": [i % 7 for i in range(90)], "y": [0, 1] * 45, "s": list("uvwxz") * 18})
    rows.to_csv(tmp_path / "t.csv", index=False)
    table = ["--table", str(tmp_path / "t.csv"), "--label", "y", "--site", "s", "--rounds", "1", "--out", str(tmp_path)]
    for more in (["--clients", "5"], ["--resume"]):
        monkeypatch.setattr(sys, "argv", ["fedtail", "run", *table, "--name", "a", *more])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
