"""Real federations beside the simulator, and what it costs not to trust the server.

    python benchmarks/federation.py                                     FedCGNM at every level, five sites, this process
    python benchmarks/federation.py --engines flower                    a process for each, over TLS
    python benchmarks/federation.py --engines flower --method trees     trees in 140 exchanges instead of FedCGNM
    python benchmarks/federation.py --engines simulator,process,flower,nvflare --rates fedhoo --trust server
    ... --sites 3 --rounds 3 --hidden 3300,3300                         rounds of two phases, with a model of 44 MB

A row is a run: seconds of a round (median, worst), megabytes to and from all sites and exchanges of a round, the first
left out, as it starts the sites' workers; then the whole run: seconds, exchanges, megabytes, CPU seconds of all
processes; how far the model is from the simulator's under the same seed (0 for
trees: the same bits); and the machine's load, which every number depends on. Ratios are to the engine's first row.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedtail.federate.deployment import Deployment
from fedtail.federate.operate import processes
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.processes import free_port
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import open_site
from fedtail.runs.config import changed, check_config, load_config
from fedtail.runs.execution import run
from fedtail.runs.record import read_history, read_timings
from fedtail.settings import Settings


def config(args: argparse.Namespace, trust: str, folder: Path) -> Settings:
    trees = args.method == "trees"
    network: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [int(width) for width in args.hidden.split(",")]},
        "method": {"name": args.method},
        "local": {"batch_size": 64},
        "rates": {"name": args.rates, **({"cold_rounds": 0} if args.rates == "fedhoo" else {})},
    }
    return check_config(
        {
            "data": {"name": "blobs", "clients": args.sites, "n_max": args.rows, "n_features": 40, "seed": 1},
            **({"method": {"name": "trees", "site": False, "lr": 0.3, "depth": 6}} if trees else network),
            "run": {"rounds": args.rounds, "seed": 1, "folder": str(folder / "runs"), "name": trust},
            "server": {"aggregate": "mean"},
            "deploy": {"trust": trust, "timeout": 120.0},
            "privacy": {"mode": "shares", "noise": 1.0} if trust == "private" else {},
            "engine": {"path": "reference"},
        }
    )


@dataclass
class CPU:
    """CPU seconds of a deployment's processes from when its run trains to when it has finished, or to the last round
    where they end with it."""

    folder: Path
    began: float = 0.0
    seconds: float = 0.0

    def __call__(self, status: dict[str, Any]) -> None:
        if status.get("state") == "training" and not self.began:
            self.began = self.spent()
        self.seconds = max(self.seconds, self.spent() - self.began) if self.began else 0.0

    def spent(self) -> float:
        """By all processes that are there and the ended children that they have waited for."""
        ticks = 0
        for process in processes.find(self.folder):
            try:
                line = Path(f"/proc/{process.pid}/stat").read_text()
            except OSError:
                continue
            ticks += sum(map(int, line.rpartition(")")[2].split()[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")


Ran = tuple[Path, float]
"""The run folder, and CPU seconds."""


def simulated(settings: Settings, deployment: Deployment) -> Ran:
    began = time.process_time()
    return run(settings).folder or Path(), time.process_time() - began


def in_process(settings: Settings, deployment: Deployment) -> Ran:
    sites = [open_site(load_site(deployment.site(name) / "site.toml")) for name in deployment.sites]
    began = time.process_time()
    transport = InProcess({k: site.handle for k, site in enumerate(sites)})
    return federate(settings, transport, deployment.sites).folder or Path(), time.process_time() - began


def over_flower(settings: Settings, deployment: Deployment) -> Ran:
    from fedtail.federate.operate import local, runs

    cpu = CPU(deployment.folder)
    try:
        local.up(deployment)
        return Path(runs.wait(deployment, runs.start(deployment), cpu)["folder"]), cpu.seconds
    finally:
        local.down(deployment)


def over_nvflare(settings: Settings, deployment: Deployment) -> Ran:
    from fedtail.federate.nvflare.app import rehearse

    cpu = CPU(deployment.folder)
    return Path(rehearse(deployment, on_change=cpu)["folder"]), cpu.seconds


ENGINES: dict[str, Callable[[Settings, Deployment], Ran]] = {
    "simulator": simulated,
    "process": in_process,
    "flower": over_flower,
    "nvflare": over_nvflare,
}


COLUMNS = ["engine", "trust", "s/round", "worst", "MB down", "MB up", "exchanges", "run: s", "exchanges", "MB", "CPU s"]
COLUMNS += ["from the simulator", "load"]


def measured(folder: Path) -> dict[str, float]:
    """Per round: medians over those after the first; and sums over the whole run."""
    history, seconds = read_history(folder), read_timings(folder)
    out = {"seconds": float(np.median(seconds[1:])), "worst": max(seconds[1:]), "all_seconds": sum(seconds)}
    for name, unit in (("down", 1e6), ("up", 1e6), ("exchanges", 1)):
        each = [record.get("traffic", {}).get(name, 0) / unit for record in history]
        out |= {name: float(np.median(each[1:])), f"all_{name}": sum(each)}
    return out


def distance(folder: Path, settings: Settings, root: Path) -> float:
    """Largest difference of a weight from the simulator's model under the seed that the run had."""
    seed = load_config(folder / "config.toml").run.seed
    here, _ = simulated(changed(settings, {"run.seed": seed, "run.folder": str(root)}), None)  # type: ignore[arg-type]
    ours, theirs = (load_file(f / "model.safetensors") for f in (here, folder))
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="process", help=f"with commas: {', '.join(ENGINES)}")
    parser.add_argument("--trust", nargs="+", help="default: all three levels; server and blind for trees")
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--rates", default="uniform")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--hidden", default="512", help="widths of the network's hidden layers, with commas")
    parser.add_argument("--rounds", type=int, help="default: 6; 20 for trees")
    args = parser.parse_args()
    args.rounds = args.rounds or (20 if args.method == "trees" else 6)
    torch.set_num_threads(1)
    print(f"{args.sites} sites, {args.method}, rates {args.rates}, {args.rounds} rounds, {os.cpu_count()} CPUs\n")
    print(
        "| engine | trust | s/round | worst | MB down | MB up | exchanges | run: s | exchanges | MB | CPU s |", end=""
    )
    print(" from the simulator | load |\n" + "|---" * 13 + "|")
    for engine in args.engines.split(","):
        first: dict[str, float] = {}
        for trust in args.trust or ["server", "blind", *(["private"] if args.method != "trees" else [])]:
            with tempfile.TemporaryDirectory() as root:
                settings = config(args, trust, Path(root))
                names = tuple(f"site-{k}" for k in range(args.sites))
                deployment = create_deployment(Path(root) / "fed", names, settings, port=free_port())
                deployment.config.write_text(settings.to_toml())
                folder, cpu = ENGINES[engine](settings, deployment)
                found = measured(folder)
                first = first or found
                apart = "" if trust == "private" else f"{distance(folder, settings, Path(root) / 's'):.1e}"
            times = f"{found['seconds']:.3f} ({found['seconds'] / first['seconds']:.2f}x) | {found['worst']:.3f}"
            each = " | ".join(f"{found[name]:.3f}" for name in ("down", "up"))
            whole = f"{found['all_seconds']:.0f} | {found['all_exchanges']:.0f}"
            whole += f" | {found['all_down'] + found['all_up']:.1f} | {cpu:.0f} | {apart} | {os.getloadavg()[0]:.1f}"
            print(f"| {engine} | {trust} | {times} | {each} | {found['exchanges']:.0f} | {whole} |", flush=True)


if __name__ == "__main__":
    main()
