"""FedAvg against torch's own SGD."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch.nn import functional as F

from fedtail.core.records import Update
from fedtail.methods import FedAvg
from fedtail.rounds.aggregation import combine
from fedtail.rounds.plan import plan_local_run
from fedtail.settings import Settings
from tests.methods.federations import awkward_federation, problem, train


def test_a_round_is_the_weighted_mean_of_clients_trained_by_torch_sgd() -> None:
    federation, decay, lr = awkward_federation(), 0.01, 0.05
    made = problem(FedAvg(weight_decay=decay), federation, epochs=2)
    start = copy.deepcopy(made.model.module)
    got = train(made, 1).x
    settings = Settings.of(epochs=2, batch_size=16, seed=5)
    total = torch.zeros_like(got, dtype=torch.float64)
    for k in range(federation.n_clients):
        module = copy.deepcopy(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, weight_decay=decay)
        for index in plan_local_run(federation.client(k), 0.5, 0, settings, "shuffled").batches:
            optimizer.zero_grad()
            x, y = federation.pool.x[index], federation.pool.y[index]
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
        local = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        total += federation.sizes[k] / federation.sizes.sum() * local.double()
    torch.testing.assert_close(got.double(), total, atol=1e-6, rtol=1e-5)


def test_identical_updates_are_taken_as_they_are() -> None:
    delta, x = torch.tensor([[0.1, -0.2]]), torch.tensor([1.0, 2.0])
    updates = [Update(k, delta, 1, (1,), (0.0,)) for k in range(3)]
    p = np.array([0.2, 0.3, 0.5])
    torch.testing.assert_close(combine(x, FedAvg().weights(p, updates, {}), updates, np.zeros(3)), x + delta[0])
