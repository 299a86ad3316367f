"""Client optimizers: what they compute, on which engines, and who refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedtail import fit
from fedtail.errors import FedtailError
from fedtail.federate.conformance import _optimizes, small_federation
from fedtail.methods import METHODS, FedAvg, FedCGNM
from fedtail.methods.base import LocalRun, LocalStep, Method
from fedtail.methods.optimizers import with_optimizer
from fedtail.settings import LocalSettings, Settings
from tests.conftest import blob_federation

STEPS, D, LR = 7, 5, 0.01


def walked(method: Method, grads: torch.Tensor) -> torch.Tensor:
    """(STEPS + 1, D) where a client's steps lead from ones, by group gradients (STEPS, H, D)."""
    run = LocalRun(0, 0, torch.ones(2).numpy(), torch.ones(2).numpy(), D, STEPS, LR, {})
    const, state = method.start(run, {})
    x = torch.ones(D)
    way = [x]
    for g in grads:
        step, state = method.direction(LocalStep(g, x, torch.ones(D), const, state, method.hyper()))
        x = x - LR * (step + method.weight_decay * x)
        way.append(x)
    return torch.stack(way)


def test_adam_is_torch_s_with_decoupled_weight_decay() -> None:
    grads = torch.randn(STEPS, 1, D, generator=torch.Generator().manual_seed(0))
    x = torch.nn.Parameter(torch.ones(D))
    theirs, way = torch.optim.AdamW([x], lr=LR, weight_decay=0.1), [torch.ones(D)]
    for g in grads:
        x.grad = g[0]
        theirs.step()
        way.append(x.detach().clone())
    torch.testing.assert_close(walked(with_optimizer(FedAvg(weight_decay=0.1), "adam"), grads), torch.stack(way))


def test_momentum_is_a_mean_of_the_directions_so_a_norm_bound_holds() -> None:
    grads = torch.randn(STEPS, 1, D, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[0.9 ** (t - i) if i <= t else 0.0 for i in range(STEPS)] for t in range(STEPS)])
    means = weights / weights.sum(1, keepdim=True) @ grads[:, 0]
    moved = walked(with_optimizer(FedAvg(), "momentum"), grads)
    torch.testing.assert_close(moved[:-1] - moved[1:], LR * means)
    made = with_optimizer(FedCGNM(), "momentum")
    assert made.bound(LR, STEPS, 2) == FedCGNM().bound(LR, STEPS, 2)
    assert with_optimizer(FedCGNM(), "adam").bound(LR, STEPS, 2) is None


def test_a_method_with_an_optimizer_is_that_method_else() -> None:
    one, two = with_optimizer(FedCGNM(beta=0.7), "adam"), with_optimizer(FedCGNM(beta=0.7), "adam")
    assert one == two and hash(one) == hash(two) and one != FedCGNM(beta=0.7)
    assert (one.name, one.title, one.traits.own_loss, one.config()) == (
        "fedcgnm",
        "FedCGNM",
        False,
        FedCGNM(beta=0.7).config(),
    )
    assert with_optimizer(one, "adam") is one and with_optimizer(FedAvg(), "sgd") == FedAvg()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_engine_and_real_sites_agree(name: str, tmp_path: Path) -> None:
    assert _optimizes(METHODS.build(name), small_federation(), tmp_path) == ""


def test_a_method_whose_steps_must_be_plain_says_so_in_fit_too() -> None:
    with pytest.raises(FedtailError, match=r"local.optimizer = 'adam' does not work with method 'scaffold': .* 'sgd'"):
        fit(blob_federation(4), "mlp", "scaffold", optimizer="adam", rounds=1)


def test_adam_has_a_learning_rate_of_its_own_and_races_its_own() -> None:
    assert Settings.of(optimizer="adam").local.lr == 1e-3 and Settings().local.lr == 0.1
    assert LocalSettings(optimizer="adam", lr=0.02).lr == 0.02
    result = fit(blob_federation(4), "mlp", "fedavg", optimizer="adam", lr="auto", rounds=10, batch_size=16)
    assert max(r["lr"] for r in result.history[0]["race"]) <= 0.01
    assert result.settings.local.optimizer == "adam"
