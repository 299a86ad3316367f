"""Which updates a round takes, and when they are enough."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedtail.core.records import Task, Update
from fedtail.errors import FedtailError
from fedtail.methods import FedAvg
from fedtail.rounds.acceptance import accept
from fedtail.settings import Settings


@pytest.mark.parametrize(("share", "clients", "least"), [(0.28, 25, 7), (0.57, 100, 57), (0.5, 5, 3), (1.0, 3, 3)])
def test_a_quorum_is_met_by_exactly_its_share_of_the_clients(share: float, clients: int, least: int) -> None:
    """0.28 * 25 is 7.000000000000001 in floating point."""
    task = Task(0, torch.zeros(2), tuple(range(clients)), {"rate": np.zeros((clients, 1))}, 0.1)
    updates = [Update(k, torch.zeros(1, 2), 1, (1,), (0.0,)) for k in range(least)]
    settings = Settings.of(quorum=share)
    problem = SimpleNamespace(method=FedAvg(), n_classes=2, model=SimpleNamespace(n_params=2))
    assert len(accept(updates, [], problem, task, settings)[0]) == least
    with pytest.raises(FedtailError, match=f"{least - 1} of {clients} clients"):
        accept(updates[1:], [], problem, task, settings)
