"""On NVFlare: ``pip install 'fedtail[nvflare,dev]'`` in its own environment, ``pytest -m nvflare``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedtail.runs.execution import run
from tests.federate.conftest import settings

pytestmark = [
    pytest.mark.nvflare,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None,
        reason="nvflare is not installed (pip install 'fedtail[nvflare]' in a separate environment)",
    ),
]


@pytest.mark.parametrize("rates", ["uniform", "fedhoo"])
def test_nvflare_gives_the_same_model_as_the_simulator(tmp_path: Path, rates: str) -> None:
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.create import create_deployment
    from fedtail.federate.operate.nvflare_poc import rehearse

    strategy = {"name": rates} if rates == "uniform" else {"name": rates, "cold_rounds": 0}
    folder = tmp_path / "fed"
    deployment = create_deployment(folder, ("north", "east", "south"), settings(rates=strategy, run={"name": "there"}))
    there = Path(rehearse(deployment, timeout=240)["folder"])
    assert processes.find(folder) == [], "the rehearsal ends all it started"
    config = settings(rates=strategy, run={"name": "here", "folder": str(tmp_path)}, engine={"path": "reference"})
    here = run(config).folder
    assert here is not None
    ours, theirs = load_file(here / "model.safetensors"), load_file(there / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
