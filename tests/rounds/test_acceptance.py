"""Which updates a round takes, and when they are enough."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedtail.core.records import DIVERGED, Refusal, Task, Update
from fedtail.errors import FedtailError
from fedtail.methods import FedAvg, FedCGNM
from fedtail.methods.base import run_bound
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


@pytest.mark.parametrize(
    ("extras", "delta", "reason"),
    [
        ({"c": torch.zeros(1, 3)}, 0.0, "differ in form from most clients'"),
        ({}, 0.0, "differ in form from most clients'"),
        ({"c": torch.full((1, 2), float("nan"))}, 0.0, "update is not finite"),
        ({"c": torch.zeros(1, 2)}, float("inf"), "update is not finite"),
    ],
)
def test_an_update_unlike_the_others_or_not_finite_is_refused(
    extras: dict[str, torch.Tensor], delta: float, reason: str
) -> None:
    task = Task(0, torch.zeros(2), (0, 1, 2), {"rate": np.zeros((3, 1))}, 0.1)
    usual = [Update(k, torch.zeros(1, 2), 1, (1,), (0.0,), extras={"c": torch.zeros(1, 2)}) for k in (0, 1)]
    other = Update(2, torch.full((1, 2), delta), 1, (1,), (0.0,), extras=extras)
    problem = SimpleNamespace(method=FedAvg(), n_classes=2, model=SimpleNamespace(n_params=2))
    taken, bad = accept([*usual, other], [], problem, task, Settings.of(quorum=0.5))
    assert [u.client for u in taken] == [0, 1] and [(r.client, r.code) for r in bad] == [(2, "update")]
    assert reason in bad[0].reason


@pytest.mark.parametrize(("round_", "given"), [(0, "the first model"), (7, "the model that round 6 left")])
def test_where_all_clients_diverge_the_model_they_were_given_is_named_and_no_client(round_: int, given: str) -> None:
    task = Task(round_, torch.zeros(2), (0, 1, 2), {"rate": np.zeros((3, 1))}, 0.1)
    refused = [Refusal(k, round_, "loss became nan at step 1 of 5", DIVERGED) for k in (0, 1)]
    infinite = Update(2, torch.full((1, 2), float("inf")), 1, (1,), (0.0,))
    problem = SimpleNamespace(method=FedAvg(), n_classes=2, model=SimpleNamespace(n_params=2))
    with pytest.raises(FedtailError, match=f"all 3 clients diverged from {given}.*; lower local.lr .now 0.1") as raised:
        accept([infinite], refused, problem, task, Settings.of(quorum=0.5))
    assert "client 0" not in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(FedtailError, match=r"0 of 3 clients .*client 0: loss became nan"):
        accept([], [*refused, Refusal(2, round_, "no reply")], problem, task, Settings.of(quorum=0.5))


def test_a_weight_decay_that_is_searched_leaves_no_bound() -> None:
    tried = {"rate": np.zeros((1, 1)), "lr": np.array([[0.2]])}
    task = Task(0, torch.zeros(2), (0,), tried, 0.1)
    assert run_bound(FedCGNM(), task, 0, 0, 5, 3) == 0.2 * 5 * 2
    searched = Task(0, torch.zeros(2), (0,), {**tried, "weight_decay": np.zeros((1, 1))}, 0.1)
    assert run_bound(FedCGNM(), searched, 0, 0, 5, 3) is None
