"""``fedtail deploy queue | backup | restore``: runs that wait, and a deployment as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtail.cli.deploy_view import Folder, follower, load, need_flower
from fedtail.cli.options import Json


def queue(
    folder: Folder,
    work: Annotated[bool, typer.Option("--work", help="Run all queued runs, one after another.")] = False,
    drop: Annotated[int, typer.Option(help="Remove the run with this number.")] = 0,
    as_json: Json = False,
) -> None:
    """Show queued runs (`run --queue` adds them), or run them. Exit code 1 if one fails."""
    deployment = load(folder)
    from fedtail.federate.operate import queue as waiting
    from fedtail.runs.config import load_config

    if drop:
        waiting.drop(deployment, drop)
        typer.echo(f"run {drop} removed from the queue")
        return
    if work:
        failed = waiting.work(deployment, follower(), lambda n, said: typer.echo(f"run {n}: {said}"))
        typer.echo("the queue is empty")
        if failed:
            raise typer.Exit(1)
        return
    found = [(number, load_config(file)) for number, file in waiting.waiting(deployment)]
    if as_json:
        typer.echo(json.dumps([{"number": n, "method": c.method.name, "rounds": c.run.rounds} for n, c in found]))
        return
    for number, config in found:
        named = f", {config.run.name}" if config.run.name else ""
        typer.echo(f"{number}: {config.method.name}, rates {config.rates.name}, {config.run.rounds} rounds{named}")
    typer.echo(f"run them with: fedtail deploy queue {folder} --work" if found else "the queue is empty")


def backup(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="The .tar.gz to write.")],
    runs: Annotated[bool, typer.Option("--runs/--no-runs", help="Include the run folders.")] = True,
) -> None:
    """Back up the deployment to one file: keys, certificates, Flower's database, configuration, runs."""
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


COMMANDS = (queue, backup, restore)
