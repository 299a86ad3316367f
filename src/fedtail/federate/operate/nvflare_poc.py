"""A rehearsal on NVFlare: its proof-of-concept system on this machine, with its own certificates, and one job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate import processes
from fedtail.federate.status import has_finished

WAIT_SECONDS = 120.0


def rehearse(
    deployment: Deployment,
    *,
    resume: bool = False,
    timeout: float = 3600.0,
    on_change: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Start NVFlare's server and clients, run the deployment's config and end them; returns the run's last status."""
    from fedtail.federate.nvflare.app import make_job

    home = deployment.folder / "nvflare"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    status = home / "run.json"
    site_file = str(deployment.folder / "sites" / "{name}" / "site.toml")
    job = make_job("fedtail", deployment.config, list(deployment.sites), site_file, status, resume=resume)
    job.export_job(str(home / "jobs"))
    try:
        nvflare(deployment, "poc", "prepare", "--force", "-c", *deployment.sites)
        nvflare(deployment, "poc", "start", "--timeout", f"{WAIT_SECONDS:.0f}")
        nvflare(deployment, "job", "submit", "-j", str(home / "jobs" / "fedtail"))
        return follow(status, home, timeout, on_change)
    finally:
        processes.stop(deployment.folder)


def follow(
    status: Path, home: Path, timeout: float, on_change: Callable[[dict[str, Any]], None] | None
) -> dict[str, Any]:
    """Wait for the end of the run that writes ``status``."""
    deadline = time.monotonic() + timeout
    last: dict[str, Any] = {}
    while time.monotonic() < deadline:
        now = dict(json.loads(status.read_text())) if status.is_file() else {}
        if now != last and on_change is not None:
            on_change(now)
        last = now
        if has_finished(now):
            return now
        time.sleep(0.2)
    raise FedtailError(f"the run did not end within {timeout:g} s; see the logs under {home}")


def nvflare(deployment: Deployment, *arguments: str) -> str:
    """One command of NVFlare, in a home of its own and marked as the deployment's."""
    home = deployment.folder / "nvflare"
    program = Path(sys.executable).parent / "nvflare"
    environment = {
        **os.environ,
        "HOME": str(home),
        "NVFLARE_POC_WORKSPACE": str(home / "poc"),
        "PATH": os.pathsep.join([str(program.parent), os.environ.get("PATH", "/usr/bin:/bin")]),
        "OMP_NUM_THREADS": "1",
        processes.MARK: str(deployment.folder),
        processes.ROLE: "nvflare",
    }
    done = subprocess.run(
        [str(program), *arguments], env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise FedtailError(f"nvflare {' '.join(arguments[:2])} failed: {' '.join(lines[-3:])}")
    return done.stdout
