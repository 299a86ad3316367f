"""``fedtail deploy add | remove | renew``, and ``backup | restore``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtail.cli.deploy_view import Folder, load, need_flower

if TYPE_CHECKING:
    from fedtail.federate.deployment import Deployment

Site = Annotated[str, typer.Argument(help="The site's name.")]


def add(
    folder: Folder,
    site: Site,
    key: Annotated[Path | None, typer.Option(help="File with the site's public key (`fedtail site keys`).")] = None,
) -> None:
    """Take in a new site, or a new key of a known one. A run in progress takes a new site in once it is online."""
    deployment = load(folder)
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.local import start_site
    from fedtail.federate.operate.membership import add_site

    grown = add_site(deployment, site, key)
    here = grown.site(site)
    if processes.find(grown.folder, "site:") and (here / "site.key").is_file():  # a rehearsal: sites are processes here
        start_site(grown, site)
        typer.echo(f"{site} added as site {len(grown.sites)} of {len(grown.sites)} and started on this machine")
    elif key is not None:
        typer.echo(f"{site} has the key in {key}; send the new list {here / 'sites.pub'} to all sites{_later(grown)}")
    elif (here / "site.pub").is_file():
        typer.echo(f"created {here}{_later(grown)}")
    else:
        typer.echo(
            f"created {here}; send it to the site, and add its key: fedtail deploy add {folder} {site} --key FILE"
        )


def remove(folder: Folder, site: Site) -> None:
    """Remove a site permanently. A run in progress continues without it."""
    deployment = load(folder)
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.membership import remove_site

    rest = remove_site(deployment, site)
    processes.stop(rest.folder, f"site:{site}")
    typer.echo(f"{site} removed, {len(rest.sites)} sites left; its folder was moved to {rest.server / 'removed'}")


def renew(folder: Folder) -> None:
    """Renew the server's certificate, for the same addresses."""
    deployment = load(folder)
    from fedtail.federate.operate.membership import renew_certificate

    ends = renew_certificate(deployment)
    typer.echo(f"server.crt is valid until {ends}; restart the SuperLink and the proxy; sites reconnect by themselves")


def _later(deployment: Deployment) -> str:
    from fedtail.federate.operate.control import is_healthy

    return "" if is_healthy(deployment) else f"; once the SuperLink is up: fedtail deploy register {deployment.shown}"


def backup(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="The .tar.gz to write.")],
    runs: Annotated[bool, typer.Option("--runs/--no-runs", help="Include the run folders.")] = True,
) -> None:
    """Back up the deployment to one file: keys, certificates, Flower's database, configuration and runs; no data."""
    deployment = load(folder)
    from fedtail.federate.operate.backup import backup as write

    count = write(deployment, file, with_runs=runs)
    typer.echo(f"{file}: {count} files, including private keys; keep it where only you can read it")


def restore(
    file: Annotated[Path, typer.Argument(help="The backup file.")],
    folder: Annotated[Path, typer.Argument(help="The new deployment folder.")],
) -> None:
    """Restore a deployment folder from a backup, on this machine or another."""
    need_flower()
    from fedtail.federate.operate.backup import restore as read

    made = read(file, folder)
    typer.echo(
        f"{len(made.sites)} sites in {made.folder}; start the systemd unit, then: fedtail deploy status {folder}"
    )


COMMANDS = (add, remove, renew, backup, restore)
