"""Flower's ServerApp: reads the deployment, waits for the sites and runs fedtail's round loop over the grid."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
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
from fedtail.runs.config import load_config
from fedtail.runs.monitor import Seen
from fedtail.runs.result import Result
from fedtail.settings import Settings

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
    if settings["question"] and deployment is not None:
        count(grid, deployment, config, Path(str(settings["question"])), context.run_id)
        return
    with one_at_a_time(deployment), Status(path_of_status(deployment), config, context.run_id) as status:
        result = train(grid, deployment, config, status, bool(settings["resume"]), int(settings["sites"]))
        status.finish(result.folder)


def train(
    grid: Grid, deployment: Deployment | None, config: Settings, status: Status, resume: bool, n_sites: int
) -> Result:
    """Train until the rounds are done."""
    if deployment is None:
        names, transport = meet(grid, n_sites, config)
        return federate(config, transport, names, resume=resume, on_round=status.round, on_start=status.start)
    names = roster(config, deployment.sites, resume=resume)
    transport = connect(grid, deployment, config, config.run.quorum if resume else 1.0, names)
    return federate(
        config,
        transport,
        names,
        resume=resume,
        on_round=status.round,
        on_start=status.start,
        on_wait=status.waiting,
    )


def count(grid: Grid, deployment: Deployment, config: Settings, asked: Path, run: int) -> None:
    """Have the sites count what a trained model makes of their rows; the answer is beside the question."""
    told = json.loads(asked.read_text())
    reference = Seen.from_json(told["reference"]) if told["reference"] else None
    with one_at_a_time(deployment), Status(asked.with_name("answer.json"), config, run) as status:
        transport = connect(grid, deployment, config)
        found = ask(told["question"], transport, Path(told["folder"]), config.deploy.timeout, reference, status.waiting)
        status.write(state="finished", counts=found.to_json())


def keys_of(deployment: Deployment, names: Mapping[int, str]) -> dict[int, bytes]:
    """Return client -> public key of its site, for those that have one: a revoked site has none."""
    files = {k: deployment.site(name) / "site.pub" for k, name in names.items()}
    return {k: public_key_bytes(file) for k, file in files.items() if file.is_file()}


def path_of_status(deployment: Deployment | None) -> Path | None:
    return deployment.server / "run.json" if deployment else None


@contextlib.contextmanager
def one_at_a_time(deployment: Deployment | None, seconds: float = 120.0) -> Iterator[None]:
    """Wait for the previous run, which Flower tells that it was stopped only when it next asks for something."""
    if deployment is None:
        yield
        return
    with (deployment.server / RUN_LOCK).open("w") as lock:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FedtailError("the previous run has not ended; see superlink.log") from None
                time.sleep(0.2)
        yield


def connect(
    grid: Grid, deployment: Deployment, config: Settings, quorum: float = 1.0, names: Sequence[str] = ()
) -> FlowerTransport:
    """Return the transport to the deployment's sites, known by the keys they authenticate with, once enough are there.

    ``names[k]`` is the site behind client k, by default in the order of the deployment; one that has left has no key.
    """
    names, wait = names or deployment.sites, config.deploy.timeout / 5
    keys = keys_of(deployment, {k: name for k, name in enumerate(names) if name in deployment.sites})
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
