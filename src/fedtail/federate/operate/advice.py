"""What an operator should do, from what ``fedtail deploy status`` sees."""

from __future__ import annotations

import re
import time
from typing import Any

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.doctor import check_certificate

SILENT_SECONDS = 900.0
"""A run that says nothing for so long is worth a look."""
HINTS = {
    "not registered": "run `fedtail deploy register {folder}`",
    "revoked": "create a new key with `fedtail deploy renew {folder} --site {site}`",
    "offline": "ask its operator for `fedtail site health` and the end of site.log",
    "created": "it has not connected yet; ask its operator to start `fedtail site run`",
}


def advice(deployment: Deployment, about: dict[str, Any], now: float | None = None) -> list[str]:
    """One line per thing to do, the most urgent first; none where all is well. about: what ``status --json`` prints."""
    now = time.time() if now is None else now
    folder, run = deployment.shown, about.get("run") or {}
    out = []
    if about["superlink"] != "up":
        out.append(f"the server is down: start its systemd unit, or `fedtail deploy up {folder}` for a rehearsal")
    if run.get("state") == "failed":
        out.append(f"the run failed ({run.get('error')}); once that is fixed: fedtail deploy run {folder} --resume")
    elif run.get("state") == "stopped":
        out.append(f"the run was stopped; resume with: fedtail deploy run {folder} --resume")
    elif run.get("state") in ("training", "waiting for sites") and now - float(run["time"]) > SILENT_SECONDS:
        minutes = (now - float(run["time"])) / 60
        out.append(f"no update from the run for {minutes:.0f} min; see superlink.log, or lower deploy.timeout")
    for site, state in about["sites"].items():
        if state != "online":
            hint = HINTS.get(state, HINTS["offline"]).format(folder=folder, site=site)
            out.append(f"{site} is {state}: {hint}")
    out += _often_refused(deployment, run)
    names = run.get("sites") or list(deployment.sites)
    out += [
        f"{names[int(k)]} differs from the others: its updates were far from theirs, or refused, {n} times; see the "
        "report's influence of sites"
        for k, n in run.get("outliers", {}).items()
        if int(k) < len(names)
    ]
    try:
        certificate = [f for f in check_certificate(deployment) if f.level != "ok"]
    except FedtailError as error:
        return [*out, str(error)]
    renew = f"; renew it with `fedtail deploy renew {folder}`"
    return [*out, *(f.message + (renew if re.search("expire|valid", f.message) else "") for f in certificate)]


def _often_refused(deployment: Deployment, run: dict[str, Any]) -> list[str]:
    """Sites that are online and yet missing in several of the last rounds."""
    faults: dict[int, list[str]] = {}
    for fault in run.get("errors", []):
        if fault["round"] >= run["round"] - 5:
            faults.setdefault(fault["client"], []).append(fault["reason"])
    names = run.get("sites") or list(deployment.sites)
    return [
        f"{names[k]} was left out {len(reasons)} times in the last 5 rounds: {reasons[-1]}"
        for k, reasons in sorted(faults.items())
        if len(reasons) >= 3 and k < len(names)
    ]
