"""A job on NVFlare: what travels with it, and why it ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "nvflare", reason="nvflare is not installed (pip install 'fedtail[nvflare]' in its own environment)"
)

import fedtail
from fedtail.errors import FedtailError
from fedtail.federate.nvflare import app
from fedtail.federate.operate.create import create_deployment
from tests.federate.conftest import settings

MAKE_JOB = """
import sys
from pathlib import Path
import fedtail
from fedtail.federate.nvflare.app import make_job
assert Path(fedtail.__file__).is_relative_to(sys.argv[1]), fedtail.__file__
folder = Path(sys.argv[2])
make_job("fedtail", folder / "config.toml", ["north", "south"], "{name}/site.toml").export_job(str(folder))
"""


@pytest.mark.parametrize("where", ["here", "installed"])
def test_the_job_carries_no_package_along(tmp_path: Path, where: str) -> None:
    """As this package is installed here, and as a wheel puts it, beside all others: NVFlare took those along."""
    (tmp_path / "config.toml").write_text(settings().to_toml())
    here = Path(fedtail.__file__).parents[1]
    if where == "installed":
        here = tmp_path / "lib" / "python3" / "site-packages"
        shutil.copytree(Path(fedtail.__file__).parent, here / "fedtail", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(here)}
    subprocess.run([sys.executable, "-c", MAKE_JOB, here, tmp_path], env=environment, check=True)
    files = [f for f in (tmp_path / "fedtail").rglob("*") if f.is_file()]
    assert {f.name for f in files} == {
        "meta.json", "config_fed_server.json", "config_fed_client.json", "job_code.py"
    }  # fmt: skip
    assert sum(f.stat().st_size for f in files) < 10_000
    about = json.loads((tmp_path / "fedtail" / "app_server" / "config" / "config_fed_server.json").read_text())
    assert about["server"]["task_request_interval"] < 1, "no two seconds for every exchange"


def test_a_simulator_that_ends_becomes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvflare"
    program.write_text("#!/bin/sh\necho ' - ERROR - no such column'\necho 'good bye'\n")
    program.chmod(0o755)
    monkeypatch.setattr(app, "PROGRAMS", tmp_path)
    deployment = create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2}))
    with pytest.raises(FedtailError, match="simulator ended: - ERROR - no such column; see") as ended:
        app.rehearse(deployment)
    assert "\n" not in str(ended.value)
