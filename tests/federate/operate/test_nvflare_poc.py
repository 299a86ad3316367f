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
from fedtail.federate.operate import nvflare_poc
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


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("id-1  fedtail  RUNNING  2026", ""),
        ("id-1  fedtail  FINISHED:EXECUTION_EXCEPTION  2026", "(FINISHED:EXECUTION_EXCEPTION): ValueError: no such"),
        ("", "(unknown)"),
    ],
)
def test_nvflares_word_for_the_job_becomes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, said: str
) -> None:
    deployment = create_deployment(tmp_path / "fed", ("north", "south"), settings(data={"clients": 2}))
    logs = deployment.folder / "nvflare" / "poc" / "site-1"
    logs.mkdir(parents=True)
    (logs / "error_log.txt").write_text("Traceback ...\nValueError: no such column\n")
    monkeypatch.setattr(nvflare_poc, "nvflare", lambda *_: f"job_id  job_name  status\n{listed}\n")
    fault = nvflare_poc.job_fault(deployment, "id-1")
    assert (said in fault) if said else fault == ""
    assert "\n" not in fault
