"""``fedtail site``: what runs where the data is."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.flags import Json
from fedtail.words import duration

app = typer.Typer(help="Run and check a site, where the data is.", no_args_is_help=True)


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder, with site.toml.")]


@app.command()
def run(
    folder: Folder,
    server: Annotated[str, typer.Option(help="host:port of the server, instead of the one in site.toml.")] = "",
) -> None:
    """Take part in a federation until stopped: keep the site connected, and restart whatever exits or hangs."""
    from fedtail.federate.operate.service import SiteService

    service = SiteService(folder, server)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, service.stop)
    service.run()


@app.command()
def health(folder: Folder, as_json: Json = False) -> None:
    """Show whether the site is connected. Exit code 1 if it is not."""
    from fedtail.federate.operate.service import read_health

    found = read_health(folder)
    if as_json:
        typer.echo(json.dumps(vars(found)))
    else:
        answered = f"{duration(time.time() - found.contact)} ago" if found.contact else "never"
        typer.echo(f"{found.site}: {found.state}{': ' + found.detail if found.detail else ''}")
        typer.echo(f"server {found.server} last answered: {answered}; restarts: {found.restarts}")
    if found.state != "connected":
        raise typer.Exit(1)


@app.command()
def keys(
    folder: Folder,
    new: Annotated[bool, typer.Option("--new", help="Create a new key; the old one becomes invalid.")] = False,
    as_json: Json = False,
) -> None:
    """Make this site's key where it has none, and show its public half, for the other sites' lists (sites.pub), and the
    fingerprint of every key on its own list, to compare with the other sites by phone."""
    from fedtail.cli.deploy_view import need
    from fedtail.federate.operate.membership import own_key

    need("cryptography")
    line, roster = own_key(folder, new=new)
    fingerprints = {} if roster is None else roster.fingerprints()
    if as_json:
        typer.echo(json.dumps({"key": line, "sites": fingerprints, "list": "" if roster is None else roster.digest}))
        return
    typer.echo(line)
    for name, fingerprint in fingerprints.items():
        typer.echo(f"{fingerprint}  {name}")
    if roster is not None:
        typer.echo(f"{roster.digest}  the whole list; it must be the same at all sites")


@app.command()
def worker(site_file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's configuration.")]) -> None:
    """Train for a site until idle. Started automatically by the first message for the site."""
    from fedtail.federate.site.worker import run_worker

    if not run_worker(site_file):
        raise typer.Exit(2)


__all__ = ["app"]
