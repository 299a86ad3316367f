from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedtail.core.records import Task, Tensors, Update
from fedtail.methods import FedAvg, LocalRun, Method, Scaffold
from fedtail.methods.base import LocalStep
from fedtail.rates import RATES
from fedtail.rates.base import RateStrategy
from fedtail.rounds import search
from fedtail.rounds.acceptance import accept
from fedtail.rounds.loop import train_rounds
from fedtail.settings import Settings
from tests.methods.federations import awkward_federation, problem, train


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_the_servers_control_is_the_weighted_mean_of_the_clients(participation: float) -> None:
    made = problem(Scaffold())
    state = train(made, 4, participation=participation)
    p = made.engine.sizes / made.engine.sizes.sum()
    kept = made.engine.state()
    mean = sum(float(p[k]) * kept[k]["control"].double() for k in kept)
    assert participation == 1.0 or len(kept) <= 5
    torch.testing.assert_close(state.method["control"].double(), mean, atol=1e-6, rtol=1e-5)


def test_with_one_full_gradient_step_a_clients_control_becomes_its_gradient() -> None:
    method, lr = Scaffold(), 0.1
    gradient, own, common = torch.tensor([1.0, -2.0]), torch.tensor([0.3, 0.4]), torch.tensor([0.1, 0.2])
    run = LocalRun(0, 0, np.array([1]), np.array([1]), 2, 1, lr, {"control": common})
    const, _ = method.start(run, {"control": own})
    step, _ = method.direction(LocalStep(gradient.unsqueeze(0), torch.zeros(2), torch.zeros(2), const, {}, {}))
    torch.testing.assert_close(step, gradient - own + common)
    kept, extras = method.finish(run, -lr * step, const, {}, {"control": own})
    torch.testing.assert_close(kept["control"], gradient)
    torch.testing.assert_close(extras["control_change"], gradient - own)


CURVATURE = torch.tensor([[1.0, 4.0], [8.0, 0.5]])
MINIMUM = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])
OPTIMUM = (CURVATURE * MINIMUM).sum(0) / CURVATURE.sum(0)


def run_on_quadratics(method: Method, rounds: int = 400, steps: int = 10, lr: float = 0.02) -> torch.Tensor:
    """Two clients, f_k(x) = sum_i a_ki (x_i - m_ki)^2 / 2, full gradients, equal weights."""
    x, state = torch.zeros(2), method.init_server(2, 1, 2)
    kept: list[Tensors] = [{}, {}]
    for t in range(rounds):
        updates = []
        for k in range(2):
            run = LocalRun(k, t, np.array([1]), np.array([1]), 2, steps, lr, method.broadcast(state))
            const, carried = method.start(run, kept[k])
            local = x.clone()
            for _ in range(steps):
                g = CURVATURE[k] * (local - MINIMUM[k])
                step, carried = method.direction(LocalStep(g.unsqueeze(0), local, x, const, carried, method.hyper()))
                local = local - lr * step
            delta = local - x
            kept[k], extras = method.finish(run, delta, const, carried, kept[k])
            extras = {key: v.unsqueeze(0) for key, v in extras.items()}
            updates.append(Update(k, delta.unsqueeze(0), 1, (steps,), (0.0,), {}, extras))
        view: Any = SimpleNamespace(weights=np.array([0.5, 0.5]))
        x = x + 0.5 * (updates[0].delta[0] + updates[1].delta[0])
        state = method.after_round(view, updates, [0, 0], state)
    return x


def test_it_reaches_the_optimum_where_local_steps_make_fedavg_drift_away() -> None:
    # Karimireddy et al., section 1 and theorem III: no bias from heterogeneity
    assert float((run_on_quadratics(FedAvg()) - OPTIMUM).abs().max()) > 0.05
    torch.testing.assert_close(run_on_quadratics(Scaffold()), OPTIMUM, atol=1e-4, rtol=0)


def test_a_round_at_learning_rate_zero_leaves_the_controls_alone(monkeypatch) -> None:
    """The last round of a cosine schedule down to 0."""
    monkeypatch.setattr(search, "LAST", 0.0)
    made = problem(Scaffold())
    begun = made.begin()
    before = train_rounds(made, Settings.of(rounds=3, lr=0.05, seed=11, validate_every=0), begun)
    assert before.history[-1]["lr"] == 0.0
    assert torch.isfinite(before.method["control"]).all()
    assert before.history[-1]["method"] == before.history[-2]["method"]
    assert all(torch.isfinite(kept["control"]).all() for kept in made.engine.state().values())


def test_an_update_with_a_control_that_is_not_finite_is_refused() -> None:
    task = Task(0, torch.zeros(2), (0, 1), {"rate": np.zeros((2, 1))}, 0.1)
    good = Update(0, torch.zeros(1, 2), 1, (1,), (0.0,), {}, {"control_change": torch.zeros(1, 2)})
    bad = Update(1, torch.zeros(1, 2), 1, (1,), (0.0,), {}, {"control_change": torch.full((1, 2), np.nan)})
    problem = SimpleNamespace(method=Scaffold(), n_classes=2, model=SimpleNamespace(n_params=2))
    taken, refused = accept([good, bad], [], problem, task, Settings.of(quorum=0.5))
    assert [u.client for u in taken] == [0] and [(r.client, r.reason) for r in refused] == [(1, "update is not finite")]


class Chosen(RateStrategy):
    """Two probes per client, of which the second is kept at clients 1 and 3."""

    name = "chosen"

    def __init__(self, n_clients: int) -> None:
        self.n_clients = n_clients

    def ask(self) -> np.ndarray:
        return np.tile([0.1, 0.9], (self.n_clients, 1))

    def patterns(self) -> str | None:
        return "binary"

    def tell(self, rewards=None, *, reports=None, present=None) -> int:
        return 0b01010

    @property
    def choice(self) -> np.ndarray:
        return (0b01010 >> np.arange(self.n_clients)) & 1

    @property
    def rates(self) -> np.ndarray:
        return self.ask()[np.arange(self.n_clients), self.choice]


def test_after_a_round_of_probes_client_and_server_keep_what_belongs_to_the_chosen_one() -> None:
    made = problem(Scaffold(), awkward_federation(validation=0.3), rates=Chosen(5))
    state = train(made, 1)
    settled = problem(
        Scaffold(), awkward_federation(validation=0.3), rates=RATES.build("fixed", 5, rates=Chosen(5).rates.tolist())
    )
    expected = train(settled, 1)
    torch.testing.assert_close(state.x, expected.x, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state.method["control"], expected.method["control"], atol=1e-6, rtol=1e-5)
    for k, kept in settled.engine.state().items():
        torch.testing.assert_close(made.engine.state()[k]["control"], kept["control"], atol=1e-6, rtol=1e-5)
    assert state.history[0]["train_loss"] == pytest.approx(expected.history[0]["train_loss"], rel=1e-5)
