"""Two processes give bit for bit what one process gives."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from fedtail.data.federation import Federation
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from fedtail.simulate import simulator


def federation() -> Federation:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 3) for n in (30, 20, 25)]
    return Federation.from_arrays(clients, clients[0], classes=list("abc"), validation=0.2)


def train(method: str, rates: str) -> dict[str, Any]:
    data = federation()
    problem = assemble(
        data,
        build_model("mlp", (6,), 3, hidden=(5,)),
        METHODS.build(method),
        RATES.build(rates, 3),
        Settings.of(batch_size=8, path="reference"),
    )
    state = train_rounds(problem, Settings.of(rounds=3, lr=0.1), problem.begin())
    kept = problem.engine.state()
    return {
        "x": state.x,
        "ranks": problem.engine.info().get("ranks", 1),
        "rates": [r["rates"] for r in state.history],
        "loss": [r["train_loss"] for r in state.history],
        "kept": {f"{k}/{n}": t for k, v in kept.items() for n, t in v.items()},
    }


def process(rank: int, port: int, folder: str, runs: list[tuple[str, str]]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.save([train(*run) for run in runs], Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_validate_and_keep_state_like_one_process(tmp_path: Path) -> None:
    runs = [("fedcgnm", "fedhoo"), ("scaffold", "uniform")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, args=(port, str(tmp_path), runs), nprocs=2)
    for i, run in enumerate(runs):
        alone = train(*run)
        assert alone["ranks"] == 1
        for r in (0, 1):
            together = torch.load(tmp_path / f"{r}.pt", weights_only=True)[i]
            assert together["ranks"] == 2
            assert torch.equal(alone["x"], together["x"])
            assert alone["rates"] == together["rates"] and alone["loss"] == together["loss"]
            assert alone["kept"].keys() == together["kept"].keys()
            assert all(torch.equal(v, together["kept"][k]) for k, v in alone["kept"].items())
    assert alone["kept"]  # SCAFFOLD does keep something


def test_a_single_process_is_not_wrapped() -> None:
    engine = simulator(federation(), build_model("mlp", (6,), 3), METHODS.build("fedavg"), Settings.of())
    assert "ranks" not in engine.info()
