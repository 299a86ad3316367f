"""``fedtail deploy add | remove | renew``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.deploy_view import Folder, load

Site = Annotated[str, typer.Argument(help="The site's name.")]


def add(
    folder: Folder,
    site: Site,
    key: Annotated[Path | None, typer.Option(help="File with the site's public key (`fedtail site keys`).")] = None,
) -> None:
    """Take in a new site, or a new key of a known one. A run in progress takes a new site in once it is online."""
    deployment = load(folder)
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.control import is_healthy
    from fedtail.federate.operate.local import start_site
    from fedtail.federate.operate.membership import add_site

    grown = add_site(deployment, site, key)
    here = grown.site(site)
    later = "" if is_healthy(grown) else f"; once the SuperLink is up: fedtail deploy register {grown.shown}"
    if processes.find(grown.folder, "site:") and (here / "site.key").is_file():  # a rehearsal: sites are processes here
        start_site(grown, site)
        typer.echo(f"{site} added as site {len(grown.sites)} of {len(grown.sites)} and started on this machine")
    elif key is not None:
        typer.echo(f"{site} has the key in {key}; send the new list {here / 'sites.pub'} to all sites{later}")
    elif (here / "site.pub").is_file():
        typer.echo(f"created {here}{later}")
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


COMMANDS = (add, remove, renew)
