"""``fedtail site``: what runs where the data is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What runs where the data is.", no_args_is_help=True)


@app.command()
def worker(site_file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's configuration.")]) -> None:
    """Train for a site until idle. Started on demand, with the first message for the site."""
    from fedtail.federate.site.worker import run_worker

    if not run_worker(site_file):
        raise typer.Exit(2)


__all__ = ["app"]
