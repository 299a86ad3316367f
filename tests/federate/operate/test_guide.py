"""docs/deploy.md, followed literally: three sites with data of their own, from their files to predictions."""

from __future__ import annotations

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
from fedtail.federate.operate.commands import free_port

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
