"""``fedtail deploy doctor``: what can be checked before round 0; and what ``status`` says there is to do."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import ssl
import stat
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, split_address
from fedtail.federate.flower import TESTED
from fedtail.federate.operate.bundle import own_hash
from fedtail.federate.operate.certificates import inspect_certificate, key_matches
from fedtail.federate.operate.control import Control, is_healthy, no_answer
from fedtail.federate.protocol.handshake import CLOCK_SECONDS, Finding
from fedtail.federate.protocol.keys import read_roster, read_site_key
from fedtail.federate.site.config import load_site
from fedtail.federate.site.ledger import Ledger
from fedtail.models.device import check_device
from fedtail.version import VERSION

EXPIRY_DAYS = 30
HINTS = {
    "not registered": "run `fedtail deploy register {folder}`",
    "without a key": "get its public key (`fedtail site keys`): fedtail deploy add {folder} {site} --key FILE",
    "offline": "ask its operator for `fedtail site health` and the log of its service",
    "created": "it has not connected yet; ask its operator to start `fedtail site run`",
}


def examine_server(deployment: Deployment) -> list[Finding]:
    """Check software, certificates, keys and who is online. What data sites have, they compare when a run begins."""
    out = [check_software(), *check_certificate(deployment)]
    for site in deployment.sites:
        out += check_key(deployment.site(site), site)
    if not is_healthy(deployment):
        return [*out, Finding("error", "server", str(no_answer(deployment)))]
    return [*out, *(Finding("error", site, hint) for site, hint in absent(deployment, nodes(deployment)).items())]


def examine_site(file: str | Path, address: str = "") -> list[Finding]:
    """Check what a site can check alone: keys, data, policy and, given the address, the way to the server."""
    config = load_site(file)
    out = [check_software(), *check_key(config.folder, config.name)]
    try:
        check_device("worker.device", config.worker.device)
        out.append(Finding("ok", "worker", f"trains on {config.worker.device}, {config.worker.threads} thread(s)"))
    except FedtailError as error:
        out.append(Finding("error", "worker", str(error)))
    try:
        Ledger(config.folder)
        schema = config.open_data().schema()
        classes = schema["classes"]
        named = f"{len(classes)} classes ({', '.join(map(str, classes[:6]))})"
        out.append(Finding("ok", "data", f"{schema['kind']}, {named}"))
    except FedtailError as error:
        out.append(Finding("error", "data", str(error)))
    return [*out, *check_connection(address, config.folder / "ca.crt")] if address else out


def nodes(deployment: Deployment) -> dict[str, str]:
    """Return Flower's status of each site."""
    with Control(deployment) as control:
        return control.nodes()


def absent(deployment: Deployment, status: dict[str, str]) -> dict[str, str]:
    """Return, for each site that is not online, what to do about it."""
    return {
        site: f"{state}: {HINTS.get(state, HINTS['offline']).format(folder=deployment.shown, site=site)}"
        for site, state in status.items()
        if state != "online"
    }


def check_software() -> Finding:
    """Check that Flower is the version that fedtail is tested with."""
    found = version("flwr")
    if found != TESTED:
        return Finding("warning", "software", f"flwr {found} is installed; fedtail is tested with {TESTED}")
    return Finding("ok", "software", f"fedtail {VERSION}, flwr {found}, app {own_hash()}")


def check_certificate(deployment: Deployment) -> list[Finding]:
    """Check the server's certificate: signed by our CA, valid now and for a while, for the address sites use."""
    seen = inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt")
    left = seen.ends - datetime.datetime.now(datetime.UTC)
    out = [*_private(deployment.server / "server.key"), *_private(deployment.server / "ca.key")]
    host, hosts = deployment.public.rpartition(":")[0], ", ".join(seen.hosts)
    renew = f"; renew it with `fedtail deploy renew {deployment.shown}`"
    if not seen.signed_by_ca:
        out.append(Finding("error", "certificate", "server.crt is not signed by ca.crt; sites will refuse the server"))
    if host not in seen.hosts:
        out.append(Finding("error", "certificate", f"server.crt is for {hosts}, but sites use {host}{renew}"))
    if left.total_seconds() < 0:
        out.append(Finding("error", "certificate", f"server.crt expired on {seen.ends:%Y-%m-%d}{renew}"))
    elif left.days < EXPIRY_DAYS:
        out.append(Finding("warning", "certificate", f"server.crt expires in {left.days} days{renew}"))
    return out or [Finding("ok", "certificate", f"valid until {seen.ends:%Y-%m-%d} for {hosts}")]


def check_key(folder: Path, name: str) -> list[Finding]:
    """Check a site's keys: there, matching, private, and on the list that runs without a trusted server need. The
    server has only the public half of sites that made their own."""
    if not (folder / "site.pub").is_file():
        missing = f"{folder}/site.pub is missing; make a key at the site with `fedtail site keys`"
        return [Finding("error", name, missing)]
    if not (folder / "site.key").is_file():
        return []
    if not key_matches(folder):
        return [Finding("error", name, "site.key and site.pub do not match")]
    if not (folder / "sites.pub").is_file():
        return [Finding("warning", name, "sites.pub is missing, so the server must be trusted")]
    roster = read_roster(folder / "sites.pub")
    if name not in roster.lines or roster.key(name) != read_site_key(folder / "site.key").public_key():
        other = "sites.pub and site.key have different keys for this site; distribute the new list"
        return [Finding("error", name, other)]
    return _private(folder / "site.key")


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
    except (OSError, http.client.HTTPException) as error:
        return [Finding("error", "server", f"{address} cannot be reached over TLS: {error}")]
    finally:
        connection.close()
    out = [Finding("ok", "server", f"{address} answers over TLS")]
    if answer.status not in (403, 404):
        out.append(Finding("warning", "server", f"{address} exposes the control path; the proxy should block it"))
    if date := answer.getheader("date"):
        offset = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        if abs(offset) > CLOCK_SECONDS:
            out.append(Finding("error", "clock", f"differs from the server's by {offset:+.0f} s; enable NTP"))
    return out


def _private(path: Path) -> list[Finding]:
    if path.is_file() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return [Finding("error", path.name, f"{path} can be read by others; run chmod 600 on it")]
    return []


def advice(deployment: Deployment, about: dict[str, Any]) -> list[str]:
    """Return a line for each thing to do, the most urgent first. about: what ``status --json`` prints."""
    run, again = about["run"], f"fedtail deploy run {deployment.shown} --resume"
    out = [] if about["superlink"] == "up" else [str(no_answer(deployment))]
    if run.get("state") == "failed":
        out.append(f"the run failed ({run.get('error')}); once that is fixed: {again}")
    elif run.get("state") == "stopped":
        out.append(f"the run was stopped; resume with: {again}")
    out += [f"{site} is {hint}" for site, hint in absent(deployment, about["sites"]).items()]
    try:
        return [*out, *(f.message for f in check_certificate(deployment) if f.level != "ok")]
    except FedtailError as error:
        return [*out, str(error)]
