"""Runs that nobody steers, from the agreement to the model."""

from __future__ import annotations

from pathlib import Path

import torch

from fedtail.federate.server import federate
from fedtail.runs.execution import run

from .loopback import Wires, open_sites, settings


def test_three_sites_come_to_the_model_of_the_simulator(tmp_path: Path) -> None:
    config = settings(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    seed = result.settings.run.seed
    assert seed != config.run.seed
    same = settings(tmp_path / "simulator", run={"seed": seed}, engine={"path": "reference"})
    expected = run(same)
    assert torch.allclose(result.x, expected.x, atol=1e-5)
    assert result.test["accuracy"] == expected.test["accuracy"]
