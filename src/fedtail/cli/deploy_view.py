"""What ``fedtail deploy`` prints: rounds as they pass, where things stand, what came of a run."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from fedtail.cli.progress import console, terminal
from fedtail.cli.tables import bare_table
from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.federate.flower import TESTED
from fedtail.report import load_run, write_report
from fedtail.words import duration

SHOWN = ("accuracy", "balanced_accuracy", "macro_f1")
LAST_FAULTS = 5


def need(package: str, where: str = "") -> None:
    """Raise one line instead of an import error where a package is missing."""
    if importlib.util.find_spec(package) is None:
        install = f"pip install 'fedtail[{'nvflare' if package == 'nvflare' else 'flower'}]' {where}"
        raise FedtailError(f"{package} is not installed; {install.strip()}")


def load(folder: str | Path) -> Deployment:
    """Return the deployment in a folder, on Flower."""
    need("flwr")
    try:
        import fedtail.federate.operate.control  # noqa: F401
    except ImportError as error:
        raise FedtailError(
            f"flwr {version('flwr')} lacks what `fedtail deploy` calls ({error}); install flwr=={TESTED}, or use "
            "`fedtail deploy app` and `flwr run`"
        ) from None
    return load_deployment(folder)


def follower() -> Callable[[dict[str, Any]], None]:
    """Return a hook that prints a line for each new round or state of a run."""
    last = ""

    def show(status: dict[str, Any]) -> None:
        nonlocal last
        parts = [str(status.get("state"))]
        if status.get("seconds"):
            parts = [f"round {status['round']}/{status['rounds']}", f"{status['seconds']:.1f} s"]
            parts += [f"{name} {status[name]:.3f}" for name in ("loss", "accuracy") if name in status]
            parts += [f"errors so far: {len(status['errors'])}"] if status.get("errors") else []
        if status.get("waiting") and status.get("state") != "finished":
            parts.append(f"waiting for {status['waiting']}")
        line = "  ".join(parts)
        if line != last:
            last = line
            console.print(line, soft_wrap=True)

    return show


def show_result(folder: Path, as_json: bool) -> None:
    """Write the report of a finished run, and print its metrics and its folder."""
    page = write_report([load_run(folder)], folder / "report.html", folder.name)
    test = json.loads((folder / "result.json").read_text())["test"]
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **test}))
        return
    known = [f"{name.replace('_', ' ')} {test[name]:.4f}" for name in SHOWN if test.get(name) is not None]
    typer.echo(f"test: {', '.join(known)}")
    typer.echo(f"run folder {folder}; open {page} in a browser")


def show_status(deployment: Deployment, about: dict[str, Any]) -> None:
    """Print sites, run and last faults. about: what ``status --json`` prints."""
    typer.echo(f"SuperLink {about['superlink']} at {deployment.host}:{deployment.port}")
    table = bare_table("site", "status")
    for name in deployment.sites:
        table.add_row(name, about["sites"].get(name, "–"))
    terminal().print(table)
    if not (run := about["run"]):
        typer.echo("no run yet")
    else:
        age = duration(max(time.time() - float(run["time"]), 0.0))
        typer.echo(f"run: {run['state']}, round {run['round']} of {run['rounds']}, last update {age} ago")
        if run["state"] == "finished":
            typer.echo(f"run folder {run['folder']}; create its report with: fedtail report {run['folder']}")
        if run.get("waiting") and run["state"] == "training":
            typer.echo(f"waiting for {run['waiting']}")
        names = run.get("sites") or deployment.sites
        for fault in run["errors"][-LAST_FAULTS:]:
            typer.echo(f"  round {fault['round'] + 1}, {names[fault['client']]}: {fault['reason']}")
    for line in about["advice"]:
        typer.echo(f"to do: {line}")
