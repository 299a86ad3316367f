"""A real Flower federation on loopback: TLS, authenticated sites, one process per message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedtail.config import Config
from fedtail.deploy import local
from fedtail.deploy.layout import Deployment
from fedtail.rates import RATES
from fedtail.run import run

from .conftest import settings

pytestmark = [pytest.mark.flower, pytest.mark.slow]


def federate(deployment: Deployment, config: Config, **options: Any) -> Path:
    """Run a config over the deployment and return its run folder."""
    config.run.folder = str(deployment.runs)
    deployment.config.write_text(config.to_toml())
    return Path(local.wait(deployment, local.run(deployment, **options))["folder"])


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rates", ["uniform", "fedhoo"])
def test_flower_gives_the_same_model_as_the_simulator(
    flower_deployment: Deployment, tmp_path: Path, rates: str
) -> None:
    if rates not in RATES:
        pytest.skip(f"{rates} is not registered")
    there = federate(flower_deployment, settings(rates={"name": rates}, run={"name": f"same-{rates}"}))
    here = run(settings(rates={"name": rates}, engine={"path": "reference"}, run={"folder": str(tmp_path)})).folder
    assert here is not None
    ours, theirs = load_file(here / "model.safetensors"), load_file(there / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for a, b in zip(history(here), history(there), strict=True):
        assert b["test"] == {name: a["test"][name] for name in b["test"]}
        assert a["rates"] == b["rates"] and a["train_loss"] == b["train_loss"]
        assert b["refused"] == [] and b["faults"] == []
