"""What it costs not to trust the server: the same run under ``server``, ``blind`` and ``private``.

    python benchmarks/trust.py                                                 five sites in this process
    python benchmarks/trust.py --engine flower                                 a process for each, over TLS
    python benchmarks/trust.py --engine flower --method trees --rounds 20      trees instead of FedCGNM

Printed are medians over the rounds after the first: seconds of a round, megabytes to and from all sites, exchanges, and
the ratios to the first row; the seconds, exchanges and megabytes of the whole run; and how far the model is from the
simulator's under the same seed (0 for trees: the same bits).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.certificates import make_site_key
from fedtail.federate.operate.commands import free_port
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.server import federate
from fedtail.federate.site.data import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.runs.build import build_federation, load_pooled
from fedtail.runs.config import changed, check_config, load_config
from fedtail.runs.execution import run
from fedtail.runs.record import read_history, read_timings
from fedtail.settings import Settings


def config(args: argparse.Namespace, trust: str, folder: Path) -> Settings:
    privacy = {"mode": "shares", "noise": 1.0} if trust == "private" else {}
    trees = args.method == "trees"
    return check_config(
        {
            "data": {"name": "blobs", "clients": args.sites, "n_max": args.rows, "n_features": 40, "seed": 1},
            "model": {} if trees else {"name": "mlp", "hidden": [args.hidden]},
            "method": {"name": "trees", "site": False} if trees else {"name": args.method},
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

    deployment = deployed(settings, root)
    try:
        local.up(deployment)
        return Path(runs.wait(deployment, runs.start(deployment))["folder"])
    finally:
        local.down(deployment)


def over_nvflare(settings: Settings, root: Path) -> Path:
    """The same with a process per site behind a server of NVFlare."""
    from fedtail.federate.operate.nvflare_poc import rehearse

    return Path(rehearse(deployed(settings, root))["folder"])


def deployed(settings: Settings, root: Path) -> Deployment:
    names = tuple(f"site-{k}" for k in range(settings.data.clients))
    return create_deployment(root / "fed", names, settings, port=free_port())


ENGINES = {"process": in_process, "flower": over_flower, "nvflare": over_nvflare}


def measured(folder: Path) -> dict[str, float]:
    """Medians over the rounds after the first."""
    traffic = [r["traffic"] for r in read_history(folder)][1:]
    out = {"seconds": float(np.median(read_timings(folder)[1:]))}
    for name, unit in (("down", 1e6), ("up", 1e6), ("exchanges", 1)):
        out[name] = float(np.median([t[name] for t in traffic])) / unit
    whole = {way: sum(r["traffic"][way] for r in read_history(folder)) for way in ("down", "up", "exchanges")}
    out["all"] = sum(read_timings(folder))
    return out | {"all_exchanges": whole["exchanges"], "all_bytes": (whole["down"] + whole["up"]) / 1e6}


def distance(folder: Path, settings: Settings, root: Path) -> float:
    """Largest difference of a weight from the simulator's model under the seed that the run had."""
    seed = load_config(folder / "config.toml").run.seed
    here = run(changed(settings, {"run.seed": seed, "run.folder": str(root), "engine.path": "reference"}))
    assert here.folder is not None
    ours, theirs = (load_file(f / "model.safetensors") for f in (here.folder, folder))
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ENGINES), default="process")
    parser.add_argument("--method", default="fedcgnm")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trust", nargs="+", default=["server", "blind", "private"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    first: dict[str, Any] = {}
    print(f"{args.sites} sites, {args.method}, {args.rounds} rounds, {args.engine}; load {os.getloadavg()[0]:.1f}")
    print("| trust | s/round | MB down | MB up | exchanges | whole run: s | exchanges | MB | from the simulator |")
    print("|---|---|---|---|---|---|---|---|---|")
    for trust in args.trust:
        with tempfile.TemporaryDirectory() as root:
            settings = config(args, trust, Path(root))
            folder = ENGINES[args.engine](settings, Path(root))
            found = measured(folder)
            first = first or found
            apart = "" if trust == "private" else f"{distance(folder, settings, Path(root) / 's'):.1e}"
            cells = [f"{found[n]:.3f} ({found[n] / first[n]:.2f}x)" for n in ("seconds", "down", "up", "exchanges")]
            whole = f"{found['all']:.0f} | {found['all_exchanges']:.0f} | {found['all_bytes']:.1f}"
            print(f"| {trust} | {' | '.join(cells)} | {whole} | {apart} |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
