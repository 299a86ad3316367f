"""A batch size that follows the size of the sites."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtail as ft
from fedtail.errors import FedtailError
from fedtail.rounds.plan import BATCHES, STEPS, batch_of, follow, settled
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.settings import LocalSettings, Settings
from tests.conftest import blob_federation


def test_the_median_site_takes_enough_steps_where_a_batch_is_small_enough_for_that() -> None:
    chosen = [follow([n]) for n in range(1, 2000)]
    assert chosen == sorted(chosen) and set(chosen) == set(BATCHES)
    for n, batch in enumerate(chosen, start=1):
        assert n >= STEPS * batch or batch == BATCHES[0]
        assert all(n < STEPS * larger for larger in BATCHES if larger > batch)


def test_one_giant_or_an_absent_site_does_not_move_it() -> None:
    small = [40, 50, 60, 70]
    assert follow(small) == follow([*small, 1_000_000]) == BATCHES[0]
    assert follow([600, 700, 0, 0, 0]) == BATCHES[-1]
    assert follow([]) == BATCHES[0]


def test_a_number_stays_what_it_is() -> None:
    asked = Settings(local=LocalSettings(batch_size=5))
    assert settled(asked, [10_000]) is asked
    assert settled(Settings(local=LocalSettings(batch_size="auto")), [10_000]).local.batch_size == BATCHES[-1]
    with pytest.raises(FedtailError, match="set a number"):
        batch_of(LocalSettings(batch_size="auto"))


@pytest.mark.parametrize("path", ["reference", "batched"])
def test_a_run_has_the_bits_of_one_with_that_number(path: str) -> None:
    federation = blob_federation(4)
    followed, said, other = (
        ft.fit(federation, "mlp", rounds=3, path=path, batch_size=batch)
        for batch in ("auto", follow(federation.sizes), 64)
    )
    assert followed.summary["found"] == {"batch_size": BATCHES[0]}
    assert "found" not in said.summary
    assert torch.equal(followed.x, said.x) and not torch.equal(followed.x, other.x)


def test_a_run_says_what_it_chose_and_a_resumed_one_keeps_it(tmp_path: Path) -> None:
    def settings(name: str) -> Settings:
        own = [f"run.folder={json.dumps(str(tmp_path))}", f"run.name={name}", "local.batch_size=auto"]
        return load_config(None, ["data.name=blobs", "data.n_max=60", "run.rounds=4", *own])

    class Killed(Exception):
        pass

    def kill(state: object, record: dict[str, object], seconds: float) -> None:
        if record["round"] == 1:
            raise Killed

    whole = run(settings("whole"))
    with pytest.raises(Killed):
        run(settings("killed"), on_round=kill)
    resumed = run(settings("killed"), resume=True)
    assert torch.equal(whole.x, resumed.x)
    assert whole.folder is not None
    about = json.loads((whole.folder / "clients.json").read_text())
    middle = np.median(about["sizes"])
    assert (
        f"batches of 16 (local.batch_size=auto): the median site has {middle:,.0f} training samples" in about["notes"]
    )
    assert json.loads((whole.folder / "result.json").read_text())["found"] == {"batch_size": 16}
    assert "Batch size 16, from the training samples" in whole.report().read_text()
    assert 'batch_size = "auto"' in (whole.folder / "config.toml").read_text()
