"""Flower's ServerApp: reads the deployment, waits for the sites and runs fedtail's round loop over the grid."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtail.checkpoint import write_atomically
from fedtail.config import Config, load_config
from fedtail.core.errors import FedtailError
from fedtail.deploy.certificates import public_key_bytes
from fedtail.deploy.federate import federate
from fedtail.deploy.handshake import Finding, compare, say_hello
from fedtail.deploy.layout import Deployment, load_deployment
from fedtail.engines.flower.transport import FlowerTransport, wait_for_nodes
from fedtail.fit import State

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run config keys: ``config`` (path), ``deployment`` (folder) or ``sites`` (number), ``resume``."""
    settings = context.run_config
    deployment = load_deployment(str(settings["deployment"])) if settings["deployment"] else None
    path = str(settings["config"]) or (str(deployment.config) if deployment else "")
    if not path:
        raise FedtailError('run config needs config="/path/to/config.toml" (and sites=N or deployment=...)')
    config = load_config(path)
    if settings["mode"] == "doctor" and deployment is not None:
        write_atomically(
            deployment.server / "doctor.json", json.dumps([asdict(f) for f in ask(grid, deployment, config)])
        )
        return
    status = Status(deployment.server / "run.json" if deployment else None, config)
    try:
        if deployment is not None:
            names, transport = list(deployment.sites), connect(grid, deployment, config)
        else:
            names = [f"site-{k + 1}" for k in range(int(settings["sites"]))]
            transport = FlowerTransport(grid, wait_for_nodes(grid, {}, len(names), config.deploy.wait))
        result = federate(
            config, transport, names, resume=bool(settings["resume"]), on_round=status.round, on_start=status.start
        )
        status.write(state="finished", folder=str(result.folder))
    except FedtailError as error:
        status.write(state="failed", error=str(error))
        raise
    except Exception as error:
        status.write(state="failed", error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        raise


def connect(grid: Grid, deployment: Deployment, config: Config) -> FlowerTransport:
    """The transport to the deployment's sites, each known by the key it authenticates with."""
    keys = {k: public_key_bytes(deployment.site(name) / "site.pub") for k, name in enumerate(deployment.sites)}
    return FlowerTransport(grid, wait_for_nodes(grid, keys, len(keys), config.deploy.wait))


def ask(grid: Grid, deployment: Deployment, config: Config) -> list[Finding]:
    """The handshake on its own, for ``doctor``."""
    names = deployment.sites
    try:
        hellos, missing = say_hello(connect(grid, deployment, config), names, config.deploy.timeout)
    except FedtailError as error:
        return [Finding("error", "sites", str(error))]
    out = [Finding("error", names[k], reason) for k, reason in missing.items()]
    out += compare(hellos, names)
    out += [
        Finding("ok", names[k], f"answers; clock {hello.clock_offset:+.1f} s, torch {hello.versions['torch']}")
        for k, hello in hellos.items()
    ]
    return out


class Status:
    """``server/run.json``: where the run stands, for ``fedtail deploy status``."""

    def __init__(self, path: Path | None, config: Config) -> None:
        self.path = path
        self.now: dict[str, Any] = {"state": "waiting for sites", "rounds": config.run.rounds, "round": 0, "errors": []}
        self.write()

    def start(self, folder: Path, done: int) -> None:
        self.write(state="training", folder=str(folder), round=done)

    def round(self, state: State, record: dict[str, Any], seconds: float) -> None:
        faults = [*record["refused"], *record.get("faults", [])]
        errors = [*self.now["errors"], *({"round": record["round"], **f} for f in faults)][-20:]
        self.write(round=state.round, seconds=round(seconds, 2), errors=errors)

    def write(self, **fields: Any) -> None:
        self.now |= {**fields, "time": time.time()}
        if self.path is not None:
            write_atomically(self.path, json.dumps(self.now, indent=1))
