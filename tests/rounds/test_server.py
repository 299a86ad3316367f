"""Server optimizers against torch's own and against the paper's algorithm 2 (Reddi et al., 2021)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtail as ft
from fedtail.data import Federation
from fedtail.errors import FedtailError
from fedtail.methods import FedAvg
from fedtail.rounds import aggregation as module
from fedtail.rounds.aggregation import in_force, server_step
from fedtail.rounds.plan import MANY, SMALL, follow_sites
from fedtail.settings import SERVER_LR, ServerSettings, Settings
from tests.conftest import blob_federation
from tests.methods.federations import problem, train

STEPS = 5
OPTIMIZERS = [name for name in SERVER_LR if name != "none"]


def gradients() -> Tensor:
    return torch.randn(STEPS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def run(optimizer: str, lr: float, **constants: float) -> Tensor:
    server, state = ServerSettings(optimizer=optimizer, lr=lr), {}
    x = torch.ones(4, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(module, name, value)
        for g in gradients():
            x, state = server_step(server, x, x - g, state)
    return x


def torch_run(make: type[torch.optim.Optimizer], **options: float) -> Tensor:
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    optimizer = make([x], **options)
    for g in gradients():
        x.grad = g.clone()
        optimizer.step()
    return x.detach()


def test_none_takes_the_aggregate_itself() -> None:
    aggregate = torch.randn(4)
    assert server_step(ServerSettings(), torch.zeros(4), aggregate, {})[0] is aggregate


def test_momentum_is_sgd_with_momentum() -> None:
    torch.testing.assert_close(run("momentum", lr=0.3, BETA1=0.8), torch_run(torch.optim.SGD, lr=0.3, momentum=0.8))


def test_momentum_0_at_rate_1_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BETA1", 0.0)
    server = {"optimizer": "momentum", "lr": 1.0}
    torch.testing.assert_close(train(problem(FedAvg()), server=server).x, train(problem(FedAvg())).x)


def test_adagrad_is_torchs_with_the_same_starting_accumulator() -> None:
    tau = 0.05
    torch.testing.assert_close(
        run("adagrad", lr=0.3, BETA1=0.0, TAU=tau),
        torch_run(torch.optim.Adagrad, lr=0.3, eps=tau, initial_accumulator_value=tau**2),
    )


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_adam_and_yogi_are_the_papers_algorithm(kind: str) -> None:
    lr, b1, b2, tau = 0.1, 0.9, 0.95, 0.01
    x, m, v = np.ones(4), np.zeros(4), np.full(4, tau**2)
    for g in gradients().numpy():
        delta = -g
        m = b1 * m + (1 - b1) * delta
        if kind == "adam":
            v = b2 * v + (1 - b2) * delta**2
        else:
            v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        x = x + lr * m / (np.sqrt(v) + tau)
    np.testing.assert_allclose(run(kind, lr=lr, BETA1=b1, BETA2=b2, TAU=tau).numpy(), x)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_buffers_take_the_aggregates_values(kind: str) -> None:
    server, x, aggregate = ServerSettings(optimizer=kind, lr=0.5), torch.ones(5), torch.full((5,), 3.0)
    out, state = server_step(server, x, aggregate, {}, n_params=3)
    assert out[3:].tolist() == [3.0, 3.0]
    assert out[:3].tolist() != [3.0, 3.0, 3.0]
    assert all(v.numel() == 3 for v in state.values())


def test_any_method_learns_under_any_server_optimizer() -> None:
    for kind in ("none", *OPTIMIZERS):
        lr = 1.0 if kind in ("none", "momentum") else 0.1
        state = train(problem(FedAvg()), 4, server={"optimizer": kind, "lr": lr})
        assert state.history[-1]["train_loss"] < state.history[0]["train_loss"], kind


def test_a_bad_kind_or_rate_is_one_clear_line() -> None:
    with pytest.raises(FedtailError, match="momentum"):
        Settings.of(server={"optimizer": "momentun"})
    with pytest.raises(FedtailError, match=r"server\.lr"):
        Settings.of(server={"lr": 0.0})


def test_an_optimizer_that_served_one_run_starts_the_next_anew(federation: Federation) -> None:
    server = {"optimizer": "adam", "lr": 0.05}
    first, second = (ft.fit(federation, rounds=2, server=server).x for _ in range(2))
    assert torch.equal(first, second)


def test_without_a_rate_an_adaptive_step_is_short_and_momentum_takes_the_aggregate_whole() -> None:
    # Reddi et al., algorithm 2, first step from m = 0, v = tau^2, per unit of lr: 0.1 g / (sqrt(v) + tau)
    g = 0.01
    moved = {}
    for name in OPTIMIZERS:
        x, _ = server_step(ServerSettings(optimizer=name), torch.zeros(1), torch.full((1,), -g), {})
        moved[name] = -float(x)
    adam = 0.1 * g / ((0.99e-6 + 0.01 * g**2) ** 0.5 + 1e-3)
    assert moved["adam"] == pytest.approx(0.03 * adam, rel=1e-4)
    assert moved["adagrad"] == pytest.approx(0.1 * 0.1 * g / ((1e-6 + g**2) ** 0.5 + 1e-3), rel=1e-4)
    assert moved["momentum"] == pytest.approx(g)
    assert max(moved["adam"], moved["yogi"], moved["adagrad"]) < 0.02  # with a rate of 1 adam moves 0.41
    assert ServerSettings(optimizer="adam", lr=1.0).step == 1.0


# -- auto -------------------------------------------------------------------------------------------------------


def test_auto_is_adam_for_many_small_sites_and_none_where_they_are_few_or_large() -> None:
    assert follow_sites([SMALL - 1] * MANY) == "adam"
    assert follow_sites([SMALL - 1] * (MANY - 1)) == "none"
    assert follow_sites([SMALL] * MANY) == "none"
    assert follow_sites([50] * MANY + [1_000_000]) == "adam", "one giant does not move it"
    assert follow_sites([50] * (MANY - 1) + [0, 0]) == "none", "nor do sites that are not there"
    assert follow_sites([]) == "none"


@pytest.mark.parametrize(("n_sites", "chosen"), [(MANY, "adam"), (5, "none")])
def test_a_run_with_auto_has_the_bits_of_one_that_names_what_it_chose(n_sites: int, chosen: str) -> None:
    federation = blob_federation(n_sites)
    auto, said = (ft.fit(federation, "mlp", rounds=3, server={"optimizer": name}) for name in ("auto", chosen))
    assert torch.equal(auto.x, said.x)
    assert auto.summary["found"] == {"server_optimizer": chosen} and "found" not in said.summary


def test_a_users_own_table_has_auto_unless_the_user_says_otherwise() -> None:
    table = replace(blob_federation(MANY), own="table")
    found = ft.fit(table, "mlp", rounds=2, lr=0.1).summary["found"]
    assert found["server_optimizer"] == "adam"
    said = ft.fit(table, "mlp", rounds=2, lr=0.1, server={"optimizer": "none"}).summary["found"]
    assert "server_optimizer" not in said


def test_auto_needs_sites_to_follow() -> None:
    assert in_force(ServerSettings(optimizer="yogi"), {}).optimizer == "yogi"
    with pytest.raises(FedtailError, match="name one"):
        in_force(ServerSettings(optimizer="auto"), {})
