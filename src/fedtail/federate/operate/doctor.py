"""``fedtail deploy doctor``: everything that can be checked before round 0, with one clear line for each."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import json
import re
import ssl
import stat
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, split_address
from fedtail.federate.flower import TESTED
from fedtail.federate.operate import runs
from fedtail.federate.operate.bundle import own_hash
from fedtail.federate.operate.certificates import inspect_certificate, key_matches
from fedtail.federate.operate.control import Control, is_healthy
from fedtail.federate.protocol.handshake import CLOCK_SECONDS, Finding
from fedtail.federate.protocol.keys import read_roster, read_site_key
from fedtail.federate.site.config import load_site
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.prepared import SiteData
from fedtail.models.device import check_device
from fedtail.version import VERSION

EXPIRY_DAYS = 30
SILENT_SECONDS = 900.0
"""A run that says nothing for so long is worth a look."""
HINTS = {
    "not registered": "run `fedtail deploy register {folder}`",
    "without a key": "get its public key (`fedtail site keys`): fedtail deploy add {folder} {site} --key FILE",
    "offline": "ask its operator for `fedtail site health` and the end of site.log",
    "created": "it has not connected yet; ask its operator to start `fedtail site run`",
}


def examine_server(deployment: Deployment, seconds: float = 180.0) -> list[Finding]:
    """Check certificates, keys, versions and who is online, and ask the sites for their schema, clock and versions."""
    out = [*check_software(), *check_certificate(deployment)]
    for site in deployment.sites:
        out += check_key(deployment.site(site), site)
    if not is_healthy(deployment):
        address, start = f"{deployment.host}:{deployment.port}", f"`fedtail deploy up {deployment.shown}`"
        return [*out, Finding("error", "server", f"no SuperLink answers at {address}; start it with {start}")]
    with Control(deployment) as control:
        nodes = control.nodes()
    away = {site: status for site, status in nodes.items() if status != "online"}
    hint = "see its site.log, and `fedtail deploy register` for a new site"
    out += [Finding("error", site, f"{status}; {hint}") for site, status in away.items()]
    return out if away else [*out, *ask_sites(deployment, seconds)]


def ask_sites(deployment: Deployment, seconds: float) -> list[Finding]:
    """Ask the sites, by a handshake over Flower, whether they agree about columns, classes, versions and clocks."""
    result = deployment.server / "doctor.json"
    result.unlink(missing_ok=True)
    run_id = runs.start_handshake(deployment)
    deadline = time.monotonic() + seconds
    while not result.is_file():
        with Control(deployment) as control:
            status, details = control.run_status(run_id)
        late = time.monotonic() > deadline
        if (late or status.startswith("finished:failed")) and not result.is_file():
            waited = f"within {seconds:g} s " if late else ""
            return [Finding("error", "sites", f"no answer {waited}(Flower says {status}: {details})")]
        time.sleep(1.0)
    return [Finding(**finding) for finding in json.loads(result.read_text())]


def examine_site(file: str | Path, address: str = "") -> list[Finding]:
    """Check what a site can check alone: keys, data, policy and, given the address, the way to the server."""
    out = check_software()
    config = load_site(file)
    out += check_key(config.folder, config.name)
    try:
        check_device("worker.device", config.worker.device)
        out.append(Finding("ok", "worker", f"trains on {config.worker.device}, {config.worker.threads} thread(s)"))
    except FedtailError as error:
        out.append(Finding("error", "worker", str(error)))
    try:
        Ledger(config.folder)
        out.append(Finding("ok", "data", describe_data(config.open_data())))
    except FedtailError as error:
        out.append(Finding("error", "data", str(error)))
    if address:
        out += check_connection(address, config.folder / "ca.crt")
    return out


def describe_data(data: SiteData) -> str:
    """Describe a site's data to its own operator: kind, size and classes."""
    schema = data.schema()
    classes = schema["classes"]
    samples = getattr(data, "table", None)
    size = f", {len(samples)} rows" if samples is not None else ""
    return f"{schema['kind']}{size}, {len(classes)} classes ({', '.join(map(str, classes[:6]))})"


def check_software() -> list[Finding]:
    """Check that Flower is there, in the version that fedtail is tested with."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        return [Finding("error", "software", "flwr is not installed; pip install 'fedtail[flower]'")]
    out = [Finding("ok", "software", f"fedtail {VERSION}, flwr {found}, app {own_hash()}")]
    if found != TESTED:
        out.append(Finding("warning", "software", f"flwr {found} is installed; fedtail is tested with {TESTED}"))
    return out


def check_certificate(deployment: Deployment) -> list[Finding]:
    """Check the server's certificate: signed by our CA, valid now and for a while, for the address sites use."""
    seen = inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt")
    now = datetime.datetime.now(datetime.UTC)
    out = []
    host = deployment.public.rpartition(":")[0]
    if not seen.signed_by_ca:
        out.append(Finding("error", "certificate", "server.crt is not signed by ca.crt; sites will refuse the server"))
    if host not in seen.hosts:
        out.append(Finding("error", "certificate", f"server.crt is for {', '.join(seen.hosts)}, but sites use {host}"))
    if not seen.begins <= now <= seen.ends:
        out.append(
            Finding("error", "certificate", f"server.crt is valid {seen.begins:%Y-%m-%d} to {seen.ends:%Y-%m-%d}")
        )
    elif (seen.ends - now).days < EXPIRY_DAYS:
        out.append(Finding("warning", "certificate", f"server.crt expires in {(seen.ends - now).days} days"))
    if not out:
        out.append(Finding("ok", "certificate", f"valid until {seen.ends:%Y-%m-%d} for {', '.join(seen.hosts)}"))
    return [*out, *_private(deployment.server / "server.key"), *_private(deployment.server / "ca.key")]


def check_key(folder: Path, name: str) -> list[Finding]:
    """Check a site's key pair: there, matching, private. The server may have deleted its copy of the private half."""
    if not (folder / "site.pub").is_file():
        return [
            Finding("error", name, f"{folder}/site.pub is missing; make a key at the site with `fedtail site keys`")
        ]
    if not (folder / "site.key").is_file():
        return []
    if not key_matches(folder):
        return [Finding("error", name, "site.key and site.pub do not match")]
    return [*_private(folder / "site.key"), *_check_roster(folder, name)]


def _check_roster(folder: Path, name: str) -> list[Finding]:
    """The list of sites that runs without a trusted server need, with this site's own key on it."""
    path = folder / "sites.pub"
    if not path.is_file():
        return [Finding("warning", name, "sites.pub is missing, so the server must be trusted")]
    roster = read_roster(path)
    if name not in roster.lines or roster.key(name) != read_site_key(folder / "site.key").public_key():
        return [
            Finding("error", name, "sites.pub and site.key have different keys for this site; distribute the new list")
        ]
    return []


def check_connection(address: str, ca: Path) -> list[Finding]:
    """Check TLS to the server with the deployment's CA, that the control path is closed, and the server's clock."""
    host, port = split_address("--server", address)
    if not ca.is_file():
        return [Finding("error", "server", f"{ca} is missing; without it the server's certificate cannot be checked")]
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection(host, port, timeout=10, context=context)
    try:
        connection.request("POST", "/v1/control/list-nodes", body=b"", headers={"content-type": "application/protobuf"})
        answer = connection.getresponse()
        answer.read()
    except (OSError, ssl.SSLError, http.client.HTTPException) as error:
        return [Finding("error", "server", f"{address} cannot be reached over TLS: {error}")]
    finally:
        connection.close()
    out = [Finding("ok", "server", f"{address} answers over TLS")]
    if answer.status not in (403, 404):
        out.append(Finding("warning", "server", f"{address} exposes the control path; the proxy should block it"))
    date = answer.getheader("date")
    if date:
        offset = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        if abs(offset) > CLOCK_SECONDS:
            out.append(Finding("error", "clock", f"differs from the server's by {offset:+.0f} s; enable NTP"))
    return out


def worst(findings: list[Finding]) -> str:
    """Return the most serious level there is."""
    order = ["ok", "warning", "error"]
    return order[int(np.max([order.index(f.level) for f in findings], initial=0))]


def _private(path: Path) -> list[Finding]:
    if path.is_file() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return [Finding("error", path.name, f"{path} can be read by others; run chmod 600 on it")]
    return []


def advice(deployment: Deployment, about: dict[str, Any], now: float | None = None) -> list[str]:
    """Return a line for each thing to do, the most urgent first. about: what ``status --json`` prints."""
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
    """Name sites that are online and yet were missing in several of the last rounds."""
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
