"""Updates that wait on disk are the updates that came."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.core.records import Deltas, Update
from fedtail.errors import FedtailError
from fedtail.federate.spool import StoredUpdate


def test_a_stored_update_is_the_update_and_leaves_no_file(tmp_path: Path) -> None:
    made = Update(
        client=3,
        delta=torch.randn(2, 1000),
        n_samples=7,
        steps=(4, 5),
        loss=(0.5, 0.25),
        reports={"local_gain": np.ones(2)},
        extras={"control_change": torch.randn(2, 10), "nothing": torch.zeros(0, 4)},
    )
    stored = StoredUpdate(made, tmp_path)
    assert not list(tmp_path.iterdir())
    assert torch.equal(stored.delta, made.delta) and (stored.client, stored.n_samples) == (3, 7)
    assert stored.extras.keys() == made.extras.keys()
    assert all(torch.equal(stored.extras[name], value) for name, value in made.extras.items())
    stored.delta.zero_()
    assert torch.equal(Deltas([stored])[0], made.delta), "what is written to a mapping is not kept"


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    update = Update(client=0, delta=torch.ones(1, 4), n_samples=1, steps=(1,), loss=(0.0,))
    with pytest.raises(FedtailError, match="cannot write"):
        StoredUpdate(update, tmp_path / "gone")
