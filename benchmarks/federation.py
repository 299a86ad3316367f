"""Round latency and payload on real federations, beside the simulator.

    python benchmarks/federation.py                  latency: two-phase rounds (FedCGNM + FedHOO), K = 5, tiny MLP
    python benchmarks/federation.py --payload        payload: the same with a 44 MB model, K = 3

Everything runs on this machine over loopback: Flower with TLS, authenticated sites and one process per message,
NVFlare (where it is installed) with its POC system. The first round of each, which starts the sites' workers, is
not counted. Medians over the rest; the machine's load is printed, since every number depends on it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.commands import free_port
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site.config import load_site
from fedtail.runs.config import check_config
from fedtail.runs.execution import run
from fedtail.settings import Settings

TINY, LARGE = [16], [3300, 3300]


def settings(clients: int, rounds: int, hidden: list[int], folder: Path, name: str) -> Settings:
    return check_config(
        {
            "data": {"name": "blobs", "clients": clients, "n_max": 300},
            "model": {"name": "mlp", "hidden": hidden},
            "rates": {"name": "fedhoo", "cold_rounds": 0},
            "local": {"batch_size": 64, "lr": 0.01},
            "run": {
                "rounds": rounds,
                "folder": str(folder / "runs"),
                "name": name,
                "checkpoint_every": rounds,
                "validate_every": 0,
            },
            "engine": {"path": "reference"},
        }
    )


def simulated(config: Settings, deployment: Deployment) -> Path:
    return run(config).folder or Path()


def in_process(config: Settings, deployment: Deployment) -> Path:
    sites = [load_site(deployment.site(name) / "site.toml").open_site() for name in deployment.sites]
    transport = InProcess({k: site.handle for k, site in enumerate(sites)})
    return federate(config, transport, deployment.sites).folder or Path()


def on_flower(config: Settings, deployment: Deployment) -> Path:
    from fedtail.federate.operate import local, runs

    deployment.config.write_text(config.to_toml())
    try:
        local.up(deployment)
        return Path(runs.wait(deployment, runs.start(deployment))["folder"])
    finally:
        local.down(deployment)


def on_nvflare(config: Settings, deployment: Deployment) -> Path:
    from fedtail.federate.operate.nvflare_poc import rehearse

    deployment.config.write_text(config.to_toml())
    return Path(rehearse(deployment)["folder"])


def measure(folder: Path) -> dict[str, Any]:
    """Seconds per round without the first, and bytes per round."""
    lines = (folder / "timings.csv").read_text().splitlines()[2:]
    seconds = [float(line.split(",")[1]) for line in lines]
    last = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])
    traffic = last.get("traffic", {})
    return {"seconds": statistics.median(seconds), "worst": max(seconds), **traffic}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload", action="store_true", help="44 MB model instead of a tiny one")
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--engines", default="", help="only these, with commas: simulator, in process, flower, nvflare")
    arguments = parser.parse_args()
    clients = arguments.clients or (3 if arguments.payload else 5)
    rounds = arguments.rounds or (3 if arguments.payload else 5)
    hidden = LARGE if arguments.payload else TINY
    engines: dict[str, Callable[[Settings, Deployment], Path]] = {"simulator": simulated, "in process": in_process}
    if importlib.util.find_spec("flwr"):
        engines["flower"] = on_flower
    if importlib.util.find_spec("nvflare"):
        engines["nvflare"] = on_nvflare
    if arguments.engines:
        engines = {name: engines[name] for name in arguments.engines.split(",")}
    print(f"K = {clients}, hidden {hidden}, two-phase rounds, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'engine':12}{'s/round':>9}{'worst':>9}{'exchanges':>11}{'MB down':>9}{'MB up':>9}{'load':>7}")
    for name, start in engines.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            config = settings(clients, rounds, hidden, folder, name.replace(" ", "-"))
            sites = tuple(f"site-{k + 1}" for k in range(clients))
            deployment = create_deployment(folder / "fed", sites, config, port=free_port())
            row = measure(start(config, deployment))
        sent = [f"{row[k] / 1e6:9.1f}" if k in row else f"{'–':>9}" for k in ("down", "up")]
        exchanges = row.get("exchanges", "–")
        print(
            f"{name:12}{row['seconds']:9.2f}{row['worst']:9.2f}{exchanges!s:>11}{''.join(sent)}"
            f"{os.getloadavg()[0]:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
