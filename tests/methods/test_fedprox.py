from __future__ import annotations

import torch

from fedtail.methods import FedProx
from fedtail.methods.base import LocalStep


def local_steps(mu: float, lr: float, steps: int) -> torch.Tensor:
    """FedProx on f(x) = sum of a quadratic and a quartic, from x0."""
    method, x0 = FedProx(mu=mu), torch.tensor([1.0, -2.0, 0.5])
    x = x0.clone()
    for _ in range(steps):
        g = x * torch.tensor([1.0, 3.0, 0.2]) + x**3
        step, _ = method.direction(LocalStep(g.unsqueeze(0), x, x0, {}, {}, method.hyper()))
        x = x - lr * step
    return x


def test_it_is_gradient_descent_on_the_loss_plus_half_mu_times_the_squared_distance() -> None:
    x0 = torch.tensor([1.0, -2.0, 0.5])
    x = x0.clone().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        loss = 0.5 * (torch.tensor([1.0, 3.0, 0.2]) * x**2).sum() + 0.25 * (x**4).sum()
        (loss + 0.5 * 0.7 * ((x - x0) ** 2).sum()).backward()
        optimizer.step()
    torch.testing.assert_close(local_steps(0.7, 0.05, 6), x.detach())


def test_the_first_local_step_is_fedavgs() -> None:
    assert torch.equal(local_steps(5.0, 0.1, 1), local_steps(0.0, 0.1, 1))


def test_without_a_gradient_the_distance_shrinks_by_1_minus_lr_mu() -> None:
    method, x0 = FedProx(mu=0.4), torch.zeros(4)
    x = torch.tensor([1.0, -2.0, 3.0, 0.5])
    step, _ = method.direction(LocalStep(torch.zeros(1, 4), x, x0, {}, {}, method.hyper()))
    torch.testing.assert_close(x - 0.1 * step, (1 - 0.1 * 0.4) * x)


def test_mu_can_be_searched_per_client() -> None:
    assert "mu" in FedProx.tunable
    assert FedProx().hyper() == {"weight_decay": 0.0, "mu": 0.01}
