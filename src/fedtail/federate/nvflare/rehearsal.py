"""A rehearsal in NVFlare's simulator: its server and a process for every site on this machine, and one job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

from fedtail.federate.deployment import Deployment
from fedtail.federate.nvflare.app import make_job
from fedtail.federate.operate import processes
from fedtail.federate.operate.create import write_config
from fedtail.federate.operate.processes import PROGRAMS, environment
from fedtail.federate.status import follow


def rehearse(
    deployment: Deployment,
    *,
    resume: bool = False,
    timeout: float = 3600.0,
    on_change: Callable[[dict[str, Any]], None] = lambda now: None,
) -> dict[str, Any]:
    """Run the deployment's config in NVFlare's simulator; returns the run's last status."""
    home = deployment.folder / "nvflare"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    status, log = home / "run.json", home / "simulator.log"
    sites, site_file = list(deployment.sites), str(deployment.folder / "sites" / "{name}" / "site.toml")
    make_job("fedtail", write_config(deployment), sites, site_file, status, resume=resume).export_job(str(home))
    command = [str(PROGRAMS / "nvflare"), "simulator", "-w", str(home / "workspace")]
    command += ["-c", ",".join(sites), "-t", str(len(sites)), str(home / "fedtail")]

    def fault() -> str:
        if processes.find(deployment.folder, "nvflare"):
            return ""
        lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        errors = [line for line in lines if "ERROR" in line or "Error: " in line]
        return f"NVFlare's simulator ended: {(errors or lines)[-1].strip()[-300:]}; see {log}"

    try:
        on_change({"state": f"starting NVFlare's simulator of {len(sites)} sites"})
        processes.start(deployment.folder, "nvflare", command, log, environment(HOME=str(home)))
        return follow(
            lambda: json.loads(status.read_text()) if status.is_file() else {}, on_change, fault, timeout=timeout
        )
    finally:
        processes.stop(deployment.folder)
