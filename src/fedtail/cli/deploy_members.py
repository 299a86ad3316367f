"""``fedtail deploy add | remove | revoke | renew``: who belongs to a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedtail.cli.deploy_view import Folder, load

if TYPE_CHECKING:
    from fedtail.federate.deployment import Deployment

Site = Annotated[str, typer.Argument(help="The site's name.")]


def add(folder: Folder, site: Site) -> None:
    """Make a folder with a key for a new site. A run that goes on takes it in once it is online."""
    deployment = load(folder)
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.local import start_site
    from fedtail.federate.operate.membership import add_site

    grown = add_site(deployment, site)
    if processes.find(grown.folder, "site:"):  # a rehearsal, where sites are processes here
        start_site(grown, site)
        typer.echo(f"{site} is site {len(grown.sites)} of {len(grown.sites)}, and was started here")
        return
    typer.echo(f"{grown.site(site)}: hand it to its operator over a channel you trust{_later(grown)}")


def remove(folder: Folder, site: Site) -> None:
    """Take a site off the list for good. A run that goes on does so without it."""
    deployment = load(folder)
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.membership import remove_site

    rest = remove_site(deployment, site)
    processes.stop(rest.folder, f"site:{site}")
    typer.echo(f"{site} was removed, {len(rest.sites)} are left; its folder is kept under {rest.server / 'removed'}")


def revoke(folder: Folder, site: Site) -> None:
    """Let nobody in with a site's key any more, e.g. when it was lost; `renew --site` makes a new one."""
    deployment = load(folder)
    from fedtail.federate.operate.membership import revoke_site

    revoke_site(deployment, site)
    typer.echo(f"the key of {site} is revoked; make a new one with: fedtail deploy renew {folder} --site {site}")


def renew(
    folder: Folder,
    site: Annotated[str, typer.Option(help="Make a new key for this site instead.")] = "",
) -> None:
    """Make a new certificate for the server, for the same addresses, or a new key for a site."""
    deployment = load(folder)
    from fedtail.federate.operate.membership import renew_certificate, renew_site

    if site:
        renew_site(deployment, site)
        key = deployment.site(site) / "site.key"
        typer.echo(
            f"{key} is new: hand it to the site over a channel you trust, where it replaces the old one"
            f"{_later(deployment)}"
        )
        return
    ends = renew_certificate(deployment)
    typer.echo(f"server.crt is valid until {ends}; restart the SuperLink and the proxy, sites find back by themselves")


def _later(deployment: Deployment) -> str:
    from fedtail.federate.operate.control import is_healthy

    return "" if is_healthy(deployment) else f"; once the SuperLink is up: fedtail deploy register {deployment.shown}"


COMMANDS = (add, remove, revoke, renew)
