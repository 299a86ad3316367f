"""What it costs not to trust the server: the same run under ``server``, ``blind`` and ``private``.

    python benchmarks/trust.py                      five sites in this process
    python benchmarks/trust.py --flower             five sites as processes behind a Flower server, with TLS
    python benchmarks/trust.py --method trees       trees instead of FedCGNM

Printed are medians over the rounds after the first: seconds of a round, megabytes to and from all sites, exchanges; how
far the models are from the simulator's under the same seed; and the ratio to ``server``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedtail.federate.operate.certificates import make_site_key
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site.data import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.runs.build import build_federation, load_pooled
from fedtail.runs.config import changed, check_config, load_config
from fedtail.runs.execution import run
from fedtail.runs.folder import read_history, read_timings
from fedtail.settings import Settings


def config(args: argparse.Namespace, trust: str, folder: Path) -> Settings:
    privacy = {"mode": "shares", "noise": 1.0} if trust == "private" else {}
    trees = args.method == "trees"
    return check_config(
        {
            "data": {"name": "blobs", "clients": args.sites, "n_max": args.rows, "n_features": 40, "seed": 1},
            "model": {} if trees else {"name": "mlp", "hidden": [args.hidden]},
            "method": {"name": args.method},
            "local": {} if trees else {"batch_size": 64},
            "run": {"rounds": args.rounds, "seed": 1, "folder": str(folder / "runs"), "name": trust},
            "server": {"aggregate": "mean"},
            "deploy": {"trust": trust, "timeout": 120.0},
            "privacy": privacy,
        }
    )


def in_process(settings: Settings, root: Path) -> Path:
    """The run folder of a federation in this process."""
    pooled = load_pooled(settings)
    whole = build_federation(settings, pooled)
    names = [f"site-{k}" for k in range(whole.n_clients)]
    for name in names:
        (root / name).mkdir(parents=True)
        make_site_key(root / name, name)
    listed = "".join((root / name / "site.pub").read_text() for name in names)
    handles = {}
    for k, name in enumerate(names):
        (root / name / "sites.pub").write_text(listed)
        data = FederationSlice(whole, k, pooled.model, pooled.model_options)
        handles[k] = Site(name, data, Policy(), root / name).handle
    result = federate(settings, InProcess(handles), names)
    assert result.folder is not None
    return result.folder


def over_flower(settings: Settings, root: Path) -> Path:
    """The same with a process per site behind a Flower server."""
    from fedtail.federate.operate import local, runs
    from fedtail.federate.operate.commands import free_port
    from fedtail.federate.operate.create import create_deployment

    names = tuple(f"site-{k}" for k in range(settings.data.clients))
    deployment = create_deployment(root / "fed", names, settings, port=free_port())
    try:
        local.up(deployment)
        return Path(runs.wait(deployment, runs.start(deployment))["folder"])
    finally:
        local.down(deployment)


def measured(folder: Path) -> dict[str, float]:
    """Medians over the rounds after the first."""
    traffic = [r["traffic"] for r in read_history(folder)][1:]
    out = {"seconds": float(np.median(read_timings(folder)[1:]))}
    for name, unit in (("down", 1e6), ("up", 1e6), ("exchanges", 1)):
        out[name] = float(np.median([t[name] for t in traffic])) / unit
    return out


def distance(folder: Path, settings: Settings, root: Path) -> float:
    """Largest difference of a weight from the simulator's model under the seed that the run had."""
    seed = load_config(folder / "config.toml").run.seed
    here = run(changed(settings, {"run.seed": seed, "run.folder": str(root), "engine.path": "reference"}))
    assert here.folder is not None
    ours, theirs = (load_file(f / "model.safetensors") for f in (here.folder, folder))
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", action="store_true")
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trust", nargs="+", default=["server", "blind", "private"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    first: dict[str, Any] = {}
    print("| trust | s/round | MB down | MB up | exchanges | from the simulator |\n|---|---|---|---|---|---|")
    for trust in args.trust:
        with tempfile.TemporaryDirectory() as root:
            settings = config(args, trust, Path(root))
            folder = (over_flower if args.flower else in_process)(settings, Path(root))
            found = measured(folder)
            first = first or found
            apart = "" if trust == "private" else f"{distance(folder, settings, Path(root) / 's'):.1e}"
            cells = [f"{found[n]:.3f} ({found[n] / first[n]:.2f}x)" for n in ("seconds", "down", "up", "exchanges")]
            print(f"| {trust} | {' | '.join(cells)} | {apart} |")


if __name__ == "__main__":
    main()
