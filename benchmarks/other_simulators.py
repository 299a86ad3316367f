"""Flower, pfl-research and fedjax on the common workload, each in a virtual environment of its own.

Each gets the same rows, clients, initial model, batch size, epochs and rounds, and must end at the same training loss.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np

from job import Job
from workload import Workload

HERE = Path(__file__).parent
PEERS = ("flower", "pfl", "fedjax")


def peer_environment(name: str) -> Path:
    """The interpreter of a peer's virtual environment, made at first use."""
    folder = Path(os.environ.get("FEDTAIL_PEERS", HERE.parent / ".cache" / "peers")) / name
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        wanted = HERE / "peers" / f"requirements-{name}.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", wanted], check=True, timeout=1800)
        (folder / ".ready").touch()
    return python


def run_peer(
    name: str, problem: Path, users: int, cohort: int, rounds: int, cores: int, device: str = "cpu"
) -> dict[str, Any]:
    """The seconds of each of a peer's rounds, and its final loss.

    With several cores each does what it offers: Flower and pfl-research run clients in as many processes, jax computes
    with as many threads. problem: a file with samples ``x``, ``y``, their ``order`` (dealt to users in equal parts),
    ``lr`` and ``batch``; rows also have ``hidden`` layers and the initial model ``start``.
    """
    start = [str(peer_environment(name))]
    if name == "pfl" and cores > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cores}"]
    script = str(HERE / "peers" / f"run_{name}.py")
    command = [*start, script, str(problem), *map(str, (users, cohort, rounds, cores)), device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        told = (done.stderr or done.stdout).splitlines()
        causes = [line for line in told if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
        raise RuntimeError("\n".join(causes[:1] or told[-5:]))  # a launcher's summary comes after the cause
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def against_peers(work: Workload, clients: int, rounds: int, cores: int) -> dict[str, Any]:
    """Peers before and after us, so that drifts of the machine show."""
    ours = Job(work, work.federation(clients), "fedavg", rate=0.0, workers=cores)
    seconds = [ours.round() for _ in range(rounds - 1)]
    out: dict[str, Any] = {"fedtail": {"seconds": min(seconds), "loss": work.loss(ours.state.x)}}
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        work.save(problem)
        for name in PEERS:
            try:
                found = run_peer(name, problem, clients, clients, rounds, cores)
                settled = found["seconds"][2:]
                out[name] = {"seconds": min(settled), "median": float(np.median(settled)), "loss": found["loss"]}
            except (RuntimeError, subprocess.SubprocessError, OSError) as error:
                out[name] = {"error": str(error)[:500]}
    seconds += [ours.round() for _ in range(rounds)]
    out["fedtail"] |= {"seconds": min(seconds), "median": float(np.median(seconds))}
    for name in PEERS:
        if "seconds" in out[name]:
            out[name]["times slower"] = out[name]["seconds"] / out["fedtail"]["seconds"]
            out[name]["median times slower"] = out[name]["median"] / out["fedtail"]["median"]
    return out
