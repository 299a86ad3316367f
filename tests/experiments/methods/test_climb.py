from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtail.core.records import Update
from fedtail.methods.base import LocalStep
from fedtail_experiments.methods.climb import CLIMB, client_weights
from tests.methods.federations import problem, train

losses_of_clients = st.lists(st.floats(0, 20), min_size=2, max_size=8)


def test_golden_values() -> None:
    dual = CLIMB(eta=0.1, eps=0.1).dual_step(
        torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    )
    np.testing.assert_allclose(dual, [0, 0, 0.03])
    np.testing.assert_allclose(client_weights(dual), [0.99, 0.99, 1.02])


def test_at_the_defaults_the_constraint_acts_within_a_run() -> None:
    # twelve dual steps, as 60 rounds have; one client of five stays 0.5 above the others, 0.4 above the mean
    losses = torch.tensor([1.5, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    weights = {}
    for eta, eps in ((2.0, 0.01), (0.1, 0.1)):
        dual = torch.zeros(5, dtype=torch.float64)
        for _ in range(12):
            dual = CLIMB(eta=eta, eps=eps).dual_step(dual, losses)
        weights[eta] = client_weights(dual).tolist()
    # lambda_0 = 12 * 2 (0.4 - 0.01) / 5 = 1.872, w_0 = 1 + 1.872 * 4 / 5; the authors' other pair hardly moves
    np.testing.assert_allclose(weights[2.0], [2.4976, 0.6256, 0.6256, 0.6256, 0.6256])
    np.testing.assert_allclose(weights[0.1][0], 1.0576)
    assert (CLIMB().eta, CLIMB().eps, CLIMB().clip) == (2.0, 0.01, 5.0)


@given(losses_of_clients, st.floats(0, 3), st.floats(0, 1), st.integers(1, 5))
def test_the_dual_step_is_the_authors(values: list[float], eta: float, eps: float, steps: int) -> None:
    # Federated-Learning-Pytorch c841a4d, core/imbalance_fl.py, with the clip at 100 of its ImbalanceFLRes
    method, losses = CLIMB(eta=eta, eps=eps), np.array(values)
    mine, theirs = torch.zeros(len(values), dtype=torch.float64), np.zeros(len(values))
    for _ in range(steps):
        weights = 1.0 + theirs - np.mean(theirs)
        np.testing.assert_allclose(client_weights(mine), np.maximum(weights, 0), atol=1e-12)
        theirs = np.clip(theirs + eta * (losses - np.mean(losses) - eps) / len(losses), 0.0, 100.0)
        mine = method.dual_step(mine, torch.as_tensor(losses))
    np.testing.assert_allclose(mine, theirs, atol=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_weights_sum_to_the_number_of_clients_while_none_is_clamped(dual: list[float]) -> None:
    assert float(client_weights(torch.tensor(dual, dtype=torch.float64)).sum()) == pytest.approx(len(dual))


def test_weights_never_go_negative() -> None:
    assert float(client_weights(torch.tensor([0.0, 50.0])).min()) == 0.0


def test_equal_losses_keep_fedavg() -> None:
    dual = CLIMB(eps=0.0).dual_step(torch.zeros(4), torch.full((4,), 2.5))
    updates = [Update(k, torch.zeros(1, 1), 1, (1,), (0.0,)) for k in range(4)]
    p = np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_array_equal(CLIMB().weights(p, updates, {"lambda": dual}), p)


def test_weights_multiply_the_sampled_clients_shares() -> None:
    updates = [Update(k, torch.zeros(1, 1), 1, (1,), (0.0,)) for k in (0, 3)]
    state = {"lambda": torch.tensor([0.0, 0.0, 0.4, 0.4])}
    np.testing.assert_allclose(CLIMB().weights(np.array([0.5, 0.5]), updates, state), [0.4, 0.6], rtol=1e-6)


def test_duals_move_every_primal_rounds_rounds_on_losses_taken_before_them() -> None:
    method = CLIMB(eta=1.0, eps=0.0, primal_rounds=2)
    history = train(problem(method), 5).history
    duals = [r["method"]["lambda"] for r in history]
    losses = [r["method"]["client_loss"] for r in history]
    assert duals[0] == duals[1] == [0.0] * 5
    assert duals[2] == duals[3] != duals[1]
    assert losses[0] == losses[1] != losses[2]
    want = method.dual_step(torch.zeros(5, dtype=torch.float64), torch.tensor(losses[1], dtype=torch.float64))
    assert duals[2] == want.tolist()


def test_gradients_are_clipped_to_the_norm_asked_for() -> None:
    g = torch.tensor([[3.0, 4.0]])
    step, _ = CLIMB(clip=1.0).direction(LocalStep(g, torch.zeros(2), torch.zeros(2), {}, {}, {}))
    assert float(torch.linalg.vector_norm(step)) == pytest.approx(1.0, abs=1e-5)
    kept, _ = CLIMB(clip=6.0).direction(LocalStep(g, torch.zeros(2), torch.zeros(2), {}, {}, {}))
    assert torch.equal(kept, g[0])
