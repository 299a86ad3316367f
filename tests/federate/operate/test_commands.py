"""The commands that start a site, as systemd, a shell and ``up`` pass them on: Flower must get the same words."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")


from fedtail.errors import FedtailError
from fedtail.federate.deployment import split_address
from fedtail.federate.operate.create import create_deployment, filled
from fedtail.federate.site.config import load_site
from tests.federate.conftest import settings

PATHS = ("/opt/fedtail/north", "/srv/my sites/north", "/srv/o'hare/100% $HOME")


def through_systemd(line: str) -> list[str]:
    """The words of an ``ExecStart=`` line, by systemd.service(5) and systemd.syntax(7)."""
    return [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]


def test_the_generated_site_unit_and_instructions_run_the_service_of_the_folder(tmp_path: Path) -> None:
    deployment = create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2}))
    folder = deployment.site("north")
    (line,) = [x for x in (folder / "fedtail-site.service").read_text().splitlines() if x.startswith("ExecStart=")]
    wanted = ["/opt/fedtail/venv/bin/fedtail", "site", "run", "/opt/fedtail/north"]
    assert through_systemd(line.removeprefix("ExecStart=")) == wanted
    (by_hand,) = [x for x in (folder / "README.md").read_text().splitlines() if "Manually: `" in x]
    assert shlex.split(by_hand.split("`")[1]) == wanted
    assert load_site(folder / "site.toml").server == deployment.public


@pytest.mark.parametrize("name", ['a"b', "a$b", "a%b", "a`b", "a\nb", "a\\b", "a\u2028b"])
def test_a_folder_whose_name_could_say_more_in_a_unit_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedtailError, match="rename it") as refused:
        create_deployment(tmp_path / name, ("north",), settings(data={"clients": 1}))
    assert "\n" not in str(refused.value) and not (tmp_path / name).exists()


@pytest.mark.parametrize("address", ['a";x:1', "a\nb:1", "a b:1", "a{}:1", "a;:1", "a:1:2\n:443", "h:٣"])
def test_an_address_that_could_say_more_in_a_configuration_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(FedtailError, match="is not of the form host:port"):
        create_deployment(tmp_path / "fed", ("north",), settings(data={"clients": 1}), public=address)
    assert split_address("server", "[::1]:443") == ("[::1]", 443)


def test_the_servers_unit_runs_as_the_owner_and_instructions_name_the_program_that_is_installed(tmp_path: Path) -> None:
    made = create_deployment(tmp_path / "fed", ("north",), settings(data={"clients": 1}))
    assert f"User={tmp_path.owner()}" in (made.server / "fedtail-superlink.service").read_text()
    here, there = (made.folder / "README.md").read_text(), (made.site("north") / "README.md").read_text()
    program = Path(sys.executable).with_name("fedtail")
    commands = re.findall(r"([^\s(`]*fedtail[^\s`]*) (?:deploy|site|methods)\b`?", here + there)
    assert set(commands) == {f'"{program}"', "/opt/fedtail/venv/bin/fedtail"}
    assert (
        "useradd --system fedtail" in there
        and "User=fedtail" in (made.site("north") / "fedtail-site.service").read_text()
    )
    texts = [p for p in made.folder.rglob("*") if p.suffix in (".md", ".service", ".toml", ".conf")]
    assert not [p for p in texts if re.search("@[a-z]+@", p.read_text())], "every word is filled in"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (apt-get install systemd)"
)
@pytest.mark.parametrize("root", ["plain", "with space"])
def test_systemd_takes_the_generated_units(tmp_path: Path, root: str) -> None:
    base = tmp_path / root
    programs = base / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "fedtail").write_text("#!/bin/sh\n")
    (programs / "fedtail").chmod(0o755)
    (base / "north").mkdir()
    deployment = create_deployment(base / "fed", ("north", "south"), settings(data={"clients": 2}))
    for name, text in {
        "fedtail-site": filled("fedtail-site.service", name="north", root=base),
        "fedtail-superlink": (deployment.server / "fedtail-superlink.service").read_text(),
    }.items():
        unit = tmp_path / f"{name}.service"
        unit.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
        said = [x for x in (done.stdout + done.stderr).splitlines() if name in x]
        assert said == [] and done.returncode == 0, done.stderr
