"""Who belongs to a deployment: ``fedtail deploy add | remove``, and ``fedtail site keys``.

What is written first is the deployment's folder; a SuperLink that is up is told at once, one that is not with
``fedtail deploy register``.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedtail.errors import FedtailError, one_of
from fedtail.federate.deployment import Deployment, check_site_names
from fedtail.federate.operate.certificates import make_site_key
from fedtail.federate.operate.control import Control, is_healthy, no_answer
from fedtail.federate.operate.create import write_rosters, write_site
from fedtail.federate.protocol.agreement import Roster, read_roster
from fedtail.federate.site.config import load_site
from fedtail.runs.config import load_config


def add_site(deployment: Deployment, name: str, key: Path | None = None) -> Deployment:
    """Take in a new site, which takes its place at the end of the list, or a new key of one that is known.

    key: the file with the site's public key, as ``fedtail site keys`` prints it.
    """
    check_site_names((name,))
    line = None if key is None else read_line(key, name)
    folder = deployment.site(name)
    for other in deployment.sites:
        public = deployment.site(other) / "site.pub"
        if line and other != name and public.is_file() and public.read_text().split()[:2] == line.split()[:2]:
            raise FedtailError(f"--key {key}: that is the key of {other!r}; every site makes a key of its own")
    if name in deployment.sites:
        if line is None:
            raise FedtailError(
                f"site {name!r} already exists in {deployment.shown}; for a new key of it, add --key FILE"
            )
        if not (folder / "site.pub").is_file() or (folder / "site.pub").read_text().split()[:2] != line.split()[:2]:
            _forget(deployment, name)
            (folder / "site.key").unlink(missing_ok=True)
    else:
        if load_config(deployment.config).data.name != "sites":
            raise FedtailError(f"{deployment.shown} is a rehearsal, whose sites are the clients of one data set")
        if folder.exists():
            raise FedtailError(f"{str(folder)!r} already exists; move it away, or choose another name")
        write_site(deployment, name)
        deployment = replace(deployment, sites=(*deployment.sites, name))
        deployment.save()
    if line is not None:
        (folder / "site.pub").write_text(line)
    write_rosters(deployment)
    if is_healthy(deployment):
        with Control(deployment) as control:
            control.register()
    return deployment


def read_line(file: Path, name: str) -> str:
    """Return the line of a site's public key from a file; one clear line if there is none."""
    try:
        kind, data, *_ = file.read_text().split(maxsplit=2)
        if not isinstance(load_ssh_public_key(f"{kind} {data}".encode()), EllipticCurvePublicKey):
            raise ValueError("another type of key")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FedtailError(f"--key {file}: no public key as `fedtail site keys` prints it ({error})") from None
    return f"{kind} {data} {name}\n"


def make_missing_keys(deployment: Deployment) -> list[str]:
    """For a rehearsal on one machine, make the keys of sites that have sent none; returns whose."""
    new = [name for name in deployment.sites if not (deployment.site(name) / "site.pub").is_file()]
    for name in new:
        make_site_key(deployment.site(name), name)
    write_rosters(deployment)
    away = [name for name in deployment.sites if not (deployment.site(name) / "site.key").is_file()]
    if away:
        raise FedtailError(
            f"the keys of {', '.join(away)} are at the sites; start the server with `fedtail deploy serve "
            f"{deployment.shown}`, and each site with `fedtail site run`"
        )
    return new


def remove_site(deployment: Deployment, name: str) -> Deployment:
    """Take a site off the list, and its key out of the SuperLink; its folder is kept under ``server/removed``."""
    if name not in deployment.sites:
        raise one_of("site", name, deployment.sites)
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


def own_key(folder: Path, *, new: bool = False) -> tuple[str, Roster | None]:
    """Return, at a site, the line of its public key and its list of sites. A site without a key makes one here; a new
    one takes the old one's place on the list. The server and the other sites must be given the line."""
    name, listed = load_site(folder / "site.toml").name, folder / "sites.pub"
    if new:
        (folder / "site.key").unlink(missing_ok=True)
    had = (folder / "site.key").is_file()
    make_site_key(folder, name)
    if listed.is_file() and not had:
        others = [line for line in listed.read_text().splitlines() if line.split(maxsplit=2)[2:] != [name]]
        listed.write_text("\n".join([*others, (folder / "site.pub").read_text()]).strip() + "\n")
    return (folder / "site.pub").read_text().strip(), read_roster(listed) if listed.is_file() else None


def _forget(deployment: Deployment, name: str) -> None:
    """Take a site's key out of a SuperLink that is up. One that is not would let the site in when it starts."""
    if not (deployment.site(name) / "site.pub").is_file():
        return
    if is_healthy(deployment):
        with Control(deployment) as control:
            control.unregister(name)
    elif (deployment.server / "superlink.db").exists():
        raise FedtailError(f"{no_answer(deployment)}; it knows the key of {name!r}, and must be told")
