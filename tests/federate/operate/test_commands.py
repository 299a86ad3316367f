"""The commands that start a site, as systemd, a shell and ``up`` pass them on: Flower must get the same words."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.common.config import parse_config_args

from fedtail.errors import FedtailError
from fedtail.federate.operate.commands import node_config, shell_line, supernode_command, systemd_line
from fedtail.federate.operate.create import create_deployment, site_unit, superlink_unit
from fedtail.federate.site.config import load_site
from tests.federate.conftest import settings

PATHS = ("/opt/fedtail/north", "/srv/my sites/north", "/srv/o'hare/100% $HOME")


def through_systemd(line: str) -> list[str]:
    """The words of an ``ExecStart=`` line, by systemd.service(5) and systemd.syntax(7)."""
    return [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]


def through_bash(line: str, tmp_path: Path) -> list[str]:
    """The words a program gets from a shell line, from a stub that prints them."""
    stub = tmp_path / "stub"
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stub.chmod(0o700)
    program, rest = line.split(" ", 1)  # the program's own path has no space here
    assert program.startswith("/opt/fedtail/venv/bin/")
    return list(json.loads(subprocess.check_output(["bash", "-c", f"{shlex.quote(str(stub))} {rest}"], text=True)))


def given_to_flower(words: list[str]) -> dict[str, object]:
    return parse_config_args([words[words.index("--node-config") + 1]])


@pytest.mark.parametrize("folder", PATHS)
def test_flower_gets_the_sites_path_from_argv_systemd_and_bash(folder: str, tmp_path: Path) -> None:
    command = supernode_command("/opt/fedtail/venv/bin/python", Path(folder), "fed.example.org:443")
    wanted = {"site": f"{folder}/site.toml"}
    assert given_to_flower(command) == wanted
    assert through_systemd(systemd_line(command)) == command
    assert given_to_flower(through_systemd(systemd_line(command))) == wanted
    assert through_bash(shell_line(command), tmp_path) == command[1:]
    assert given_to_flower(through_bash(shell_line(command), tmp_path)) == wanted


def test_a_path_that_flower_cannot_be_given_is_one_line() -> None:
    with pytest.raises(FedtailError, match="both kinds of quotes"):
        node_config(Path('/srv/o\'hare/"x"/site.toml'))


def test_the_generated_site_unit_and_instructions_run_the_service_of_the_folder(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2}))
    folder = deployment.site("north")
    (line,) = [x for x in (folder / "fedtail-site.service").read_text().splitlines() if x.startswith("ExecStart=")]
    wanted = ["/opt/fedtail/venv/bin/fedtail", "site", "run", "/opt/fedtail/north"]
    assert through_systemd(line.removeprefix("ExecStart=")) == wanted
    (by_hand,) = [x for x in (folder / "README.md").read_text().splitlines() if "Manually: `" in x]
    assert through_bash(by_hand.split("`")[1], tmp_path) == wanted[1:]
    assert load_site(folder / "site.toml").server == deployment.public


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (apt-get install systemd)"
)
@pytest.mark.parametrize("root", ["plain", "with space and 100%"])
def test_systemd_takes_the_generated_units(tmp_path: Path, root: str) -> None:
    base = tmp_path / root
    programs = base / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "fedtail").write_text("#!/bin/sh\n")
    (programs / "fedtail").chmod(0o755)
    (base / "north").mkdir()
    deployment = create_deployment(base / "fed", ("north", "south"), settings(data={"clients": 2}))
    for name, text in {
        "fedtail-site": site_unit("north", base),
        "fedtail-superlink": superlink_unit(deployment, programs),
    }.items():
        unit = tmp_path / f"{name}.service"
        unit.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
        said = [x for x in (done.stdout + done.stderr).splitlines() if name in x]
        assert said == [] and done.returncode == 0, done.stderr
