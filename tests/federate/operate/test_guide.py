"""docs/deploy.md, followed literally: three sites with data of their own, from their files to predictions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.federate.deployment import load_deployment
from fedtail.federate.operate import local, processes
from fedtail.federate.operate.processes import free_port
from fedtail.runs.config import load_config
from tests.waiting import until

GUIDE = Path(__file__).parents[3] / "docs" / "deploy.md"


@pytest.mark.flower
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_the_guides_own_data_example_gives_a_model_a_report_and_predictions(tmp_path: Path) -> None:
    """Its commands as they stand, but for two rounds instead of ten and a port that is free here."""
    section = GUIDE.read_text().split("## Sites with data of their own")[1].split("\n## ")[0]
    (python,) = re.findall(r"^```python\n(.*?)^```", section, re.S | re.M)
    (console,) = re.findall(r"^```console\n(.*?)^```", section, re.S | re.M)
    commands = [line.removeprefix("$ ") for line in console.splitlines()]
    assert sum("run.rounds=10" in c and "--own-data" in c for c in commands) == 1
    script = "\n".join(commands).replace("run.rounds=10", "run.rounds=2")
    script = script.replace("--own-data", f"--own-data --port {free_port()}")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", python], cwd=tmp_path, check=True)
    try:
        done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert processes.find(tmp_path / "crash") == [], "down ends everything"
        deployment = load_deployment(tmp_path / "crash")
        local.up(deployment)
        time.sleep(4)  # a site that Flower took for the one before it would be refused, and end
        assert sum("flower/supernode.py" in p.command for p in processes.find(deployment.folder)) == 3, "up after down"
        local.down(deployment)
    finally:
        processes.stop(tmp_path / "crash")
    (folder,) = (tmp_path / "crash" / "runs").iterdir()
    page = (folder / "report.html").read_text()
    assert (tmp_path / "crash" / "sites" / "NY" / "agreements").is_dir(), "sites have signed, and have the model too"
    assert "What went wrong" not in page
    assert len(pd.read_csv(tmp_path / "predicted.csv")) == len(pd.read_csv(tmp_path / "NY.csv"))
    assert "test: accuracy" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.flower
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_from_keys_to_the_first_run_every_command_is_real(tmp_path: Path) -> None:
    """Server and sites in folders of their own, keys made at the sites, a run that no server steers; as the guide says,
    but for addresses, the folder of the sites, and two rounds."""
    page, names, port = GUIDE.read_text(), ("north", "east", "south"), free_port()
    (python,) = re.findall(r"^```python\n(.*?)^```", page.split("## Sites with data of their own")[1], re.S | re.M)[:1]
    (console,) = re.findall(r"^```console\n(.*?)^```", page.split("## Go real")[1].split("\n## ")[0], re.S | re.M)
    init, keys, add, again, *rest = [line.removeprefix("$ ").partition("#")[0] for line in console.splitlines()]
    fed, opt = tmp_path / "fed", tmp_path / "opt"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def shell(command: str, fails: bool = False) -> str:
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert fails or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout if done.returncode == 0 else ""

    def here(line: str, name: str) -> str:
        return line.replace("/opt/fedtail", str(opt)).replace("north", name)

    shell(f"{sys.executable} -c '{python.replace(chr(39), chr(34))}'")
    shell("fedtail data schema NY.csv --label severity --out schema.toml")
    shell(init.replace("fed.example.org:443", f"127.0.0.1:{port}") + f" --port {port} run.rounds=2")
    assert load_config(fed / "config.toml").deploy.trust == "blind"
    shell("cp schema.toml fed/ && mkdir opt")
    for name, file in zip(names, ("NY", "TX", "CA"), strict=True):
        shell(f"mv fed/sites/{name} opt/{name} && mkdir fed/sites/{name} && cp opt/{name}/site.toml fed/sites/{name}/")
        shell(f"cp {file}.csv opt/{name}/data.csv && cp schema.toml opt/{name}/")
        shell(here(keys, name))
        shell(f"cp opt/{name}/site.pub {name}.pub && {here(add, name)}")
    for name in names:
        shell(f"cp fed/sites/{name}/sites.pub opt/{name}/")
    assert len({shell(here(again, name)).splitlines()[-1] for name in names}) == 1, "all have the same list"
    assert not [key for name in names for key in (fed / "sites" / name).glob("*.key")], "the server has seen no key"
    program = str(Path(sys.executable).with_name("fedtail"))
    try:
        processes.start(fed, "superlink", [program, "deploy", "serve", str(fed)], fed / "server" / "log", environment)
        until(lambda: shell(rest[0], fails=True).startswith("registered north, east, south"), "the server")
        for name in names:
            log = opt / name / "site.log"
            processes.start(fed, f"site:{name}", [program, "site", "run", str(opt / name)], log, environment)
        online = dict.fromkeys(names, "online")
        until(lambda: json.loads(shell(f"{rest[1]} --json").splitlines()[-1])["sites"] == online, "all sites")
        for name in names:
            checked = shell(f"fedtail deploy doctor --site opt/{name}/site.toml --server 127.0.0.1:{port}")
            assert "answers over TLS" in checked and "table, 3 classes" in checked
        shell(rest[2])
        shell(rest[3].replace("--detach", ""))
        shell(f"fedtail site health opt/{names[0]}")
    finally:
        processes.stop(fed)
    (run,) = (fed / "runs").iterdir()
    assert (run / "report.html").is_file()
    assert all(len([*(opt / name).glob("agreements/*/run/model.safetensors")]) == 1 for name in names)
