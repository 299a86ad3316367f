"""``fedtail deploy doctor``: what can be checked before round 0; and what ``status`` says there is to do."""

from __future__ import annotations

import contextlib
import datetime
import ssl
import stat
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, split_address
from fedtail.federate.flower import TESTED
from fedtail.federate.operate.certificates import inspect_certificate, key_matches
from fedtail.federate.operate.control import Control, is_healthy, no_answer
from fedtail.federate.operate.runs import where
from fedtail.federate.protocol.agreement import read_roster
from fedtail.federate.site.config import load_site
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.own import open_data
from fedtail.models.device import check_device
from fedtail.version import VERSION

EXPIRY_DAYS = 30
AHEAD, BEHIND = 5.0, 300.0
"""Seconds by which a site's clock may differ from the server's: beyond, Flower does not believe its signatures."""
PROTOBUF = "application/protobuf"
HINTS = {
    "not registered": "run `fedtail deploy register {folder}`",
    "without a key": "get its public key (`fedtail site keys`): fedtail deploy add {folder} {site} --key FILE",
    "offline": "ask its operator for `fedtail site health` and the log of its service",
    "registered": "it has not connected yet; ask its operator to start `fedtail site run`, or for its log",
}


@dataclass(frozen=True)
class Finding:
    """One thing ``doctor`` has to say."""

    level: str
    """``ok``, ``warning`` or ``error``."""
    subject: str
    message: str


def examine_server(deployment: Deployment) -> list[Finding]:
    """Check software, certificates, keys and who is online. What data sites have, they compare when a run begins."""
    keys = [finding for site in deployment.sites for finding in check_key(deployment.site(site), site)]
    out = [check_software(), *check_certificate(deployment), *keys]
    if not is_healthy(deployment):
        return [*out, Finding("error", "server", str(no_answer(deployment)))]
    return [*out, *(Finding("error", site, hint) for site, hint in absent(deployment, nodes(deployment)).items())]


def examine_site(file: str | Path, address: str = "") -> list[Finding]:
    """Check what a site can check alone: keys, data, policy and, given the address, the way to the server."""
    config = load_site(file)

    def worker() -> str:
        check_device("worker.device", config.worker.device)
        return f"trains on {config.worker.device}, {config.worker.threads} thread(s)"

    def data() -> str:
        Ledger(config.folder)
        schema = open_data(config).schema()
        return f"{schema['kind']}, {len(schema['classes'])} classes ({', '.join(map(str, schema['classes'][:6]))})"

    out = [check_software(), *check_key(config.folder, config.name)]
    for subject, check in (("worker", worker), ("data", data)):
        try:
            out.append(Finding("ok", subject, check()))
        except FedtailError as error:
            out.append(Finding("error", subject, str(error)))
    return [*out, *check_connection(address, config.folder / "ca.crt")] if address else out


def nodes(deployment: Deployment) -> dict[str, str]:
    """Return Flower's status of each site."""
    with Control(deployment) as control:
        return control.nodes()


def absent(deployment: Deployment, status: dict[str, str]) -> dict[str, str]:
    """Return, for each site that is not online, what to do about it."""
    hints = {s: HINTS.get(state, HINTS["offline"]) for s, state in status.items() if state != "online"}
    return {s: f"{status[s]}: {hint.format(folder=deployment.shown, site=s)}" for s, hint in hints.items()}


def check_software() -> Finding:
    """Check that Flower is the version that fedtail is tested with."""
    found = version("flwr")
    if found != TESTED:
        return Finding("warning", "software", f"flwr {found} is installed; fedtail is tested with {TESTED}")
    return Finding("ok", "software", f"fedtail {VERSION}, flwr {found}")


def check_certificate(deployment: Deployment) -> list[Finding]:
    """Check the server's certificate: signed by our CA, valid now and for a while, for the address sites use."""
    seen = inspect_certificate(deployment.server / "server.crt", deployment.server / "ca.crt")
    left = seen.ends - datetime.datetime.now(datetime.UTC)
    host, hosts = deployment.public.rpartition(":")[0], ", ".join(seen.hosts)
    renew = f"; renew it with `fedtail deploy renew {deployment.shown}`"
    wrong = {
        "server.crt is not signed by ca.crt; sites will refuse the server": not seen.signed_by_ca,
        f"server.crt is for {hosts}, but sites use {host}{renew}": host not in seen.hosts,
        f"server.crt expired on {seen.ends:%Y-%m-%d}{renew}": left.days < 0,
    }
    out = [*_private(deployment.server / "server.key"), *_private(deployment.server / "ca.key")]
    out += [Finding("error", "certificate", line) for line, is_so in wrong.items() if is_so]
    if 0 <= left.days < EXPIRY_DAYS:
        out.append(Finding("warning", "certificate", f"server.crt expires in {left.days} days{renew}"))
    return out or [Finding("ok", "certificate", f"valid until {seen.ends:%Y-%m-%d} for {hosts}")]


def check_key(folder: Path, name: str) -> list[Finding]:
    """Check a site's keys: there, matching, private, and on the list that runs without a trusted server need. The
    server has only the public half of sites that made their own."""
    public, private, listed = (folder / file for file in ("site.pub", "site.key", "sites.pub"))
    if not public.is_file():
        return [Finding("error", name, f"{public} is missing; make a key at the site with `fedtail site keys`")]
    if not private.is_file():
        return []
    try:
        if not key_matches(folder):
            return [Finding("error", name, "site.key and site.pub do not match; `fedtail site keys` writes site.pub")]
        if not listed.is_file():
            return [Finding("warning", name, "sites.pub is missing, so the server must be trusted")]
        if read_roster(listed).lines.get(name, "").split() != public.read_text().split()[:2]:
            other = "sites.pub and site.key have different keys for this site; distribute the new list"
            return [Finding("error", name, other)]
    except FedtailError as error:
        return [Finding("error", name, str(error))]
    return _private(private)


def check_connection(address: str, ca: Path) -> list[Finding]:
    """Check TLS to the server with the deployment's CA, and that the control path is closed."""
    split_address("--server", address)
    if not ca.is_file():
        return [Finding("error", "server", f"{ca} is missing; without it the server's certificate cannot be checked")]
    try:
        with httpx.Client(verify=ssl.create_default_context(cafile=str(ca)), timeout=10) as client:
            answer = client.post(f"https://{address}/v1/control/list-nodes", headers={"content-type": PROTOBUF})
    except (httpx.HTTPError, OSError) as error:  # a ca.crt that is none, too
        return [Finding("error", "server", f"{address} cannot be reached over TLS with {ca}: {error}")]
    out = [Finding("ok", "server", f"{address} answers over TLS")]
    with contextlib.suppress(KeyError, ValueError, TypeError):  # an answer without a date
        ahead = (datetime.datetime.now(datetime.UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds()
        if not -BEHIND < ahead < AHEAD:
            told = f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
            out.append(Finding("error", "clock", f"{told}, which refuses to let the site in; set it by NTP"))
    if answer.status_code not in (403, 404):
        out.append(Finding("warning", "server", f"{address} exposes the control path; the proxy should block it"))
    return out


def _private(path: Path) -> list[Finding]:
    if path.is_file() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return [Finding("error", path.name, f"{path} can be read by others; run chmod 600 on it")]
    return []


def survey(deployment: Deployment) -> dict[str, Any]:
    """Return what ``status --json`` prints: server, sites, the run, and what there is to do."""
    up = is_healthy(deployment)
    about = {"superlink": "up" if up else "down", "sites": nodes(deployment) if up else {}, "run": where(deployment)}
    return {**about, "advice": advice(deployment, about)}


def advice(deployment: Deployment, about: dict[str, Any]) -> list[str]:
    """Return a line for each thing to do, the most urgent first."""
    run, again = about["run"], f"fedtail deploy run {deployment.shown} --resume"
    out = [] if about["superlink"] == "up" else [str(no_answer(deployment))]
    if run.get("state") == "failed":
        out.append(f"the run failed ({run.get('error')}); once that is fixed: {again}, or start a new run")
    elif run.get("state") == "stopped":
        out.append(f"the run was stopped; resume with: {again}")
    out += [f"{site} is {hint}" for site, hint in absent(deployment, about["sites"]).items()]
    try:
        return [*out, *(f.message for f in check_certificate(deployment) if f.level != "ok")]
    except FedtailError as error:
        return [*out, str(error)]
