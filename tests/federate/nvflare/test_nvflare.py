"""On NVFlare: ``pip install 'fedtail[nvflare,dev]'`` in its own environment, ``pytest -m nvflare``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedtail.runs.config import changed, load_config
from fedtail.runs.execution import run
from fedtail.settings import ModelSettings
from tests.federate.conftest import settings

FIVE = tuple(f"site-{k + 1}" for k in range(5))
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
    from fedtail.federate.nvflare.app import rehearse
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.create import create_deployment

    strategy = {"name": rates} if rates == "uniform" else {"name": rates, "cold_rounds": 0}
    folder = tmp_path / "fed"
    deployment = create_deployment(folder, ("north", "east", "south"), settings(rates=strategy, run={"name": "there"}))
    there = Path(rehearse(deployment)["folder"])
    assert processes.find(folder) == [], "the rehearsal ends all it started"
    config = settings(rates=strategy, run={"name": "here", "folder": str(tmp_path)}, engine={"path": "reference"})
    here = run(config).folder
    assert here is not None
    ours, theirs = load_file(here / "model.safetensors"), load_file(there / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("method", ["fedcgnm", "trees"])
def test_a_relay_over_nvflare_carries_sums_that_every_site_verifies(tmp_path: Path, method: str) -> None:
    """Under ``blind`` each site ends with the server's model, bit by bit: that of the simulator under the seed that the
    sites drew (trees the same bits, a network within the fixed point of sums)."""
    from fedtail.federate.nvflare.app import rehearse
    from fedtail.federate.operate.create import create_deployment

    blind = {"trust": "blind", "timeout": 60.0}
    named = {"name": "trees", "site": False} if method == "trees" else {"name": method}
    config = settings(method=named, data={"clients": 5}, run={"name": "there", "rounds": 2}, deploy=blind)
    if method == "trees":
        config = config.model_copy(update={"model": ModelSettings()})
    deployment = create_deployment(tmp_path / "fed", FIVE, config)
    there = Path(rehearse(deployment)["folder"])
    ours = load_file(there / "model.safetensors")
    for site in deployment.sites:
        (file,) = (deployment.site(site) / "agreements").glob("*/run/model.safetensors")
        assert all(torch.equal(ours[name], found) for name, found in load_file(file).items()), site
    seed = load_config(there / "config.toml").run.seed
    assert seed != config.run.seed, "the sites drew it"
    same = {"run.seed": seed, "data.seed": config.data_seed}
    where = {"run.folder": str(tmp_path), "run.name": "here", "engine.path": "reference"}
    here = run(changed(config, {**same, **where})).folder
    assert here is not None
    for name, value in load_file(here / "model.safetensors").items():
        assert torch.equal(value, ours[name]) if method == "trees" else torch.allclose(value, ours[name], atol=1e-5)
