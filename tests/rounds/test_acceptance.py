"""Which updates a round takes, and when they are enough."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedtail.core.records import Task, Update
from fedtail.errors import FedtailError
from fedtail.methods import FedAvg, FedCGNM
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


@pytest.mark.parametrize(("length", "refused"), [(0.99, []), (1.01, [1])])
def test_an_update_longer_than_the_method_allows_is_refused(length: float, refused: list[int]) -> None:
    """FedCGNM moves a client by less than lr * steps * groups."""
    method, lr, steps = FedCGNM(n_groups=2), 0.1, 5
    task = Task(0, torch.zeros(2), (0, 1), {"rate": np.zeros((2, 1))}, lr)
    updates = [Update(0, torch.zeros(1, 2), 9, (steps,), (0.0,)),
               Update(1, torch.tensor([[length * lr * steps * 2, 0.0]]), 9, (steps,), (0.0,))]  # fmt: skip
    problem = SimpleNamespace(method=method, n_classes=2, model=SimpleNamespace(n_params=2))
    taken, bad = accept(updates, [], problem, task, Settings.of(quorum=0.5))
    assert [r.client for r in bad] == refused and len(taken) == 2 - len(refused)
    assert all("exceeds the method's bound" in r.reason for r in bad)
