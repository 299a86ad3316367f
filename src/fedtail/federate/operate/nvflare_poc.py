"""A rehearsal on NVFlare: its proof-of-concept system on this machine, with its own certificates, and one job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.nvflare.app import make_job
from fedtail.federate.operate import processes
from fedtail.federate.operate.commands import PROGRAMS
from fedtail.federate.operate.create import write_config
from fedtail.federate.status import follow

GOING_ON = ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")
"""NVFlare's words for a job that is not over; the others are ``FINISHED:`` and how."""


def rehearse(
    deployment: Deployment,
    *,
    resume: bool = False,
    timeout: float = 3600.0,
    on_change: Callable[[dict[str, Any]], None] = lambda now: None,
) -> dict[str, Any]:
    """Start NVFlare's server and clients, run the deployment's config and end them; returns the run's last status."""
    home = deployment.folder / "nvflare"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    status = home / "run.json"
    site_file = str(deployment.folder / "sites" / "{name}" / "site.toml")
    job = make_job("fedtail", write_config(deployment), list(deployment.sites), site_file, status, resume=resume)
    job.export_job(str(home / "jobs"))
    try:
        on_change({"state": f"starting NVFlare's server and {len(deployment.sites)} clients"})
        nvflare(deployment, "poc", "prepare", "--force", "-c", *deployment.sites)
        nvflare(deployment, "poc", "start", "--no-wait")
        job_id = submit(deployment)
        on_change({"state": f"job {job_id} submitted; NVFlare starts it at the server and the sites"})
        return follow(
            lambda: json.loads(status.read_text()) if status.is_file() else {},
            on_change,
            lambda: job_fault(deployment, job_id),
            silence=20.0,
            timeout=timeout,
        )
    finally:
        processes.stop(deployment.folder)


def job_fault(deployment: Deployment, job_id: str) -> str:
    """Return why a job does not go on, in one line; empty if NVFlare says that it does."""
    home = deployment.folder / "nvflare"
    listed = nvflare(deployment, "job", "list", "-i", job_id)
    words = next((line.split() for line in listed.splitlines() if line.startswith(job_id)), [])
    state = next((word for word in words if word in GOING_ON or word.startswith("FINISHED:")), "unknown")
    if state in GOING_ON:
        return ""
    logs = sorted((f for f in home.rglob("error_log.txt") if f.stat().st_size), key=lambda f: f.stat().st_mtime)
    lines = logs[-1].read_text(errors="replace").strip().splitlines() if logs else ["no error in its logs"]
    return f"NVFlare ended the job ({state}): {lines[-1].strip()[-300:]}; see the logs under {home}"


def submit(deployment: Deployment, seconds: float = 240.0) -> str:
    """Submit the job once the system takes it, and return its name."""
    job, deadline = str(deployment.folder / "nvflare" / "jobs" / "fedtail"), time.monotonic() + seconds
    while True:
        try:
            answer = nvflare(deployment, "job", "submit", "-j", job, "--submit-token", deployment.name)
            if found := re.search(r"job_id: (\S+)", answer):
                return found[1]
            raise FedtailError(f"NVFlare did not accept the job: {' '.join(answer.split())[-300:]}")
        except FedtailError:
            if time.monotonic() > deadline:
                raise
            time.sleep(2.0)


def nvflare(deployment: Deployment, *arguments: str, seconds: float = 45.0) -> str:
    """Run a command of NVFlare, in a home of its own and marked as the deployment's; returns what it printed. In 2.9.0
    one that has done its work may hang where it closes its connection, and is ended."""
    home = deployment.folder / "nvflare"
    environment = {
        **os.environ,
        "HOME": str(home),
        "NVFLARE_POC_WORKSPACE": str(home / "poc"),
        "PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "/usr/bin:/bin")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        processes.MARK: str(deployment.folder),
        processes.ROLE: "nvflare",
    }
    log = home / "command.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(PROGRAMS / "nvflare"), *arguments], env=environment, cwd=home, stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = 0
    said = log.read_text(errors="replace")
    if code:
        raise FedtailError(f"nvflare {' '.join(arguments[:2])} failed: {' '.join(said.split())[-300:]}")
    return said
