"""Flower's ServerApp: reads the deployment, waits for the sites and runs fedtail's round loop over the grid."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtail.errors import FedtailError
from fedtail.federate.counted import ask
from fedtail.federate.deployment import Deployment, check_site_names, load_deployment
from fedtail.federate.flower.transport import FlowerTransport, wait_for_nodes
from fedtail.federate.operate.certificates import public_key_bytes
from fedtail.federate.protocol.handshake import say_hello
from fedtail.federate.server import federate, roster
from fedtail.federate.status import RUN_LOCK, Status
from fedtail.files import is_locked
from fedtail.runs.config import load_config
from fedtail.runs.monitor import Seen
from fedtail.settings import Settings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run config keys: ``config`` (path), ``deployment`` (folder) or ``sites`` (number), ``resume``, ``question``."""
    given = context.run_config
    deployment = load_deployment(str(given["deployment"])) if given["deployment"] else None
    path = str(given["config"]) or (str(deployment.config) if deployment else "")
    if not path:
        raise FedtailError('run config needs config="/path/to/config.toml" (and sites=N or deployment=...)')
    config, resume = load_config(path), bool(given["resume"])
    if given["question"] and deployment is not None:
        count(grid, deployment, config, Path(str(given["question"])), context.run_id)
        return
    file = deployment.server / "run.json" if deployment else None
    with one_at_a_time(deployment), Status(file, config, context.run_id) as status:
        if deployment is None:
            names, transport = meet(grid, int(given["sites"]), config)
        else:
            names = roster(config, deployment.sites, resume=resume)
            transport = connect(grid, deployment, config, config.run.quorum if resume else 1.0, names)
        with_status = partial(federate, on_round=status.round, on_start=status.start, on_wait=status.waiting)
        status.finish(with_status(config, transport, names, resume=resume).folder)


def count(grid: Grid, deployment: Deployment, config: Settings, file: Path, run: int) -> None:
    """Have the sites count what a trained model makes of their rows; the answer is beside the question."""
    asked = json.loads(file.read_text())
    reference = Seen.from_json(asked["reference"]) if asked["reference"] else None
    with one_at_a_time(deployment), Status(file.with_name("answer.json"), config, run) as status:
        where = (connect(grid, deployment, config), Path(asked["folder"]), config.deploy.timeout)
        counts = ask(asked["question"], *where, reference, status.waiting)
        status.write(state="finished", counts=counts.to_json())


@contextlib.contextmanager
def one_at_a_time(deployment: Deployment | None, seconds: float = 120.0) -> Iterator[None]:
    """Wait for the previous run, which Flower tells that it was stopped only when it next asks for something."""
    if deployment is None:
        yield
        return
    file, deadline = deployment.server / RUN_LOCK, time.monotonic() + seconds
    while is_locked(file):
        if time.monotonic() > deadline:
            raise FedtailError("the previous run has not ended; see the SuperLink's log")
        time.sleep(0.2)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def connect(
    grid: Grid, deployment: Deployment, config: Settings, quorum: float = 1.0, names: Sequence[str] = ()
) -> FlowerTransport:
    """Return the transport to the deployment's sites, known by the keys they authenticate with, once enough are there.

    ``names[k]`` is the site behind client k, by default in the order of the deployment; one that has left has no key.
    """
    names, wait = names or deployment.sites, config.deploy.timeout / 5
    files = {k: deployment.site(name) / "site.pub" for k, name in enumerate(names) if name in deployment.sites}
    keys = {k: public_key_bytes(file) for k, file in files.items() if file.is_file()}
    return FlowerTransport(grid, wait_for_nodes(grid, keys, len(keys), wait, names=names, quorum=quorum), keys=keys)


def meet(grid: Grid, n: int, config: Settings) -> tuple[list[str], FlowerTransport]:
    """Take ``n`` nodes of a federation that is not our deployment, and let them say who they are."""
    if n < 1:
        raise FedtailError("run config needs sites=N, the number of sites to wait for, or deployment=...")
    strangers = FlowerTransport(grid, wait_for_nodes(grid, {}, n, config.deploy.timeout / 5))
    hellos, missing = say_hello(strangers, range(n), config.deploy.timeout)
    if missing:
        raise FedtailError(f"not all nodes are fedtail sites: {'; '.join(missing.values())}")
    ordered = sorted(hellos.values(), key=lambda hello: hello.site)
    names = [hello.site for hello in ordered]
    check_site_names(tuple(names))
    return names, FlowerTransport(grid, {k: strangers.nodes[hello.client] for k, hello in enumerate(ordered)})
