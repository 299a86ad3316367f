"""Who belongs to a deployment: ``fedtail deploy add | remove | revoke | renew``.

What is written first is the deployment's folder; a SuperLink that is up is told at once, one that is not with
``fedtail deploy register``. A run that goes on reads the list of sites after every round.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from dataclasses import replace
from pathlib import Path

from fedtail.errors import FedtailError, one_of
from fedtail.federate.deployment import Deployment, check_site_names
from fedtail.federate.flower.keys import public_key_bytes
from fedtail.federate.operate.certificates import inspect_certificate, make_server_certificate, make_site_key
from fedtail.federate.operate.control import Control, is_healthy
from fedtail.federate.operate.create import write_rosters, write_site
from fedtail.federate.protocol.keys import read_roster
from fedtail.runs.config import load_config


def add_site(deployment: Deployment, name: str) -> Deployment:
    """A folder with a key for a new site, which takes its place at the end of the list."""
    check_site_names((name,))
    if name in deployment.sites:
        raise FedtailError(f"site {name!r} already exists in {deployment.shown}")
    if deployment.site(name).exists():
        raise FedtailError(f"{str(deployment.site(name))!r} already exists; move it away, or choose another name")
    client = None
    config = load_config(deployment.config)
    if config.data.name != "sites":
        taken = [_slice(deployment, site) for site in deployment.sites]
        client = next((k for k in range(config.data.clients) if k not in taken), None)
        if client is None:
            raise FedtailError(
                f"this is a rehearsal, and all {config.data.clients} clients of its data set have a site; remove "
                "one first, or begin with a larger --local"
            )
    write_site(deployment, name, client)
    grown = replace(deployment, sites=(*deployment.sites, name))
    grown.save()
    write_rosters(grown)
    if is_healthy(grown):
        with Control(grown) as control:
            control.register(name)
    return grown


def remove_site(deployment: Deployment, name: str) -> Deployment:
    """Take a site off the list, and its key out of the SuperLink; its folder is kept under ``server/removed``."""
    _known(deployment, name)
    if len(deployment.sites) == 1:
        raise FedtailError(f"{name!r} is the last site of {deployment.shown}; a deployment needs at least one")
    _forget(deployment, name)
    rest = replace(deployment, sites=tuple(site for site in deployment.sites if site != name))
    rest.save()
    if deployment.site(name).exists():
        kept = deployment.server / "removed"
        kept.mkdir(mode=0o700, exist_ok=True)
        shutil.move(deployment.site(name), kept / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    write_rosters(rest)
    return rest


def revoke_site(deployment: Deployment, name: str) -> None:
    """A key that may be known to others is worth nothing from now on; the site stays on the list, without one."""
    _known(deployment, name)
    _forget(deployment, name)
    for key in ("site.key", "site.pub"):
        (deployment.site(name) / key).unlink(missing_ok=True)
    write_rosters(deployment)


def renew_site(deployment: Deployment, name: str) -> None:
    """A new key for a site; the old one is worth nothing from now on."""
    revoke_site(deployment, name)
    make_site_key(deployment.site(name), name)
    write_rosters(deployment)
    if is_healthy(deployment):
        with Control(deployment) as control:
            control.register(name)


def own_key(folder: Path, *, new: bool = False) -> tuple[str, str, list[str]]:
    """At a site: the line of its public key, and a fingerprint of its list of sites with their names. A new key takes
    the old one's place on that list; the server and the other sites must be given the line."""
    file = folder / "site.toml"
    if not file.is_file():
        raise FedtailError(f"{str(file)!r} does not exist; give a site's folder")
    name = str(tomllib.loads(file.read_text()).get("site", {}).get("name", ""))
    listed = folder / "sites.pub"
    if new:
        for old in ("site.key", "site.pub"):
            (folder / old).unlink(missing_ok=True)
        make_site_key(folder, name)
        if listed.is_file():
            others = [line for line in listed.read_text().splitlines() if line.split(maxsplit=2)[2:] != [name]]
            listed.write_text("\n".join([*others, (folder / "site.pub").read_text()]).strip() + "\n")
    if not (folder / "site.pub").is_file():
        raise FedtailError(f"{str(folder / 'site.pub')!r} does not exist; create a key with --new")
    roster = read_roster(listed) if listed.is_file() else None
    line = (folder / "site.pub").read_text().strip()
    return line, "" if roster is None else roster.digest, [] if roster is None else sorted(roster.keys)


def renew_certificate(deployment: Deployment) -> str:
    """A new certificate of the server for the same addresses; returns the day on which it ends."""
    server = deployment.server
    if not (server / "ca.key").is_file():
        raise FedtailError(f"{str(server / 'ca.key')!r} is missing; restore the CA's key to sign a certificate")
    hosts = inspect_certificate(server / "server.crt", server / "ca.crt").hosts
    outer = deployment.public.rpartition(":")[0]
    make_server_certificate(server, list(dict.fromkeys([outer, *hosts])))
    return f"{inspect_certificate(server / 'server.crt', server / 'ca.crt').ends:%Y-%m-%d}"


def _known(deployment: Deployment, name: str) -> None:
    if name not in deployment.sites:
        raise one_of("site", name, deployment.sites)


def _forget(deployment: Deployment, name: str) -> None:
    """Take a site's key out of a SuperLink that is up. One that is not would let the site in when it starts."""
    public = deployment.site(name) / "site.pub"
    if not public.is_file():
        return
    if not is_healthy(deployment):
        if (deployment.server / "superlink.db").exists():
            address = f"{deployment.host}:{deployment.port}"
            raise FedtailError(f"no SuperLink answers at {address}, and it knows the key of {name!r}; start it first")
        return
    with Control(deployment) as control:
        control.unregister(public_key_bytes(public))


def _slice(deployment: Deployment, site: str) -> int | None:
    """Which client of the data set a rehearsal's site plays."""
    file: Path = deployment.site(site) / "site.toml"
    return tomllib.loads(file.read_text()).get("data", {}).get("client") if file.is_file() else None
