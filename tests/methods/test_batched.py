"""Every client function gives the same on stacked clients as client by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtail.core.records import Tensors
from fedtail.methods import METHODS, Batch, LocalRun, Method
from fedtail.methods.base import LocalStep

K, B, C, D = 3, 8, 4, 6
COUNTS = ((20, 8, 3, 1), (15, 0, 2, 2), (0, 7, 0, 0))
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "class_balanced": [{}, {"variant": "sigmoid"}, {"variant": "focal"}],
    "climb": [{"clip": 0.5}],
    "fedgrab": [{"balance": "all"}, {"balance": "tail"}],
    "logit_adjustment": [{"prior": "local"}, {"prior": "global"}],
}
CASES = [(name, options) for name in METHODS for options in OPTIONS.get(name, [{}])]


def start(method: Method, client: int) -> tuple[Tensors, Tensors]:
    message = {
        "control": torch.linspace(-1, 1, D),
        "class_weight": torch.tensor([1.0, 1.5, 2.0, 0.5]),
        "prior": torch.tensor([0.7, 0.27, 0.03, 0.0]),
        "kd_weight": torch.full((1,), 0.1 * client),
        "weighted": torch.ones(()),
        "relabel": torch.ones(()),
        "momentum": torch.linspace(1, -2, D),
        "alpha": torch.tensor(0.3),
    }
    counts = np.array(COUNTS[client])
    run = LocalRun(client, 2, counts, 2 * counts, D, 5, 0.1, message)
    rng = torch.Generator().manual_seed(client)
    kept = {"control": torch.randn(D, generator=rng)} if method.name == "scaffold" else {}
    if method.name == "fedgrab":
        kept = {k: torch.rand(C, generator=rng) for k in ("positive", "negative", "error1", "error2", "output")}
    if method.name == "fedrela":
        answers, seen = torch.rand(C, C, generator=rng), 5.0
        kept = {"moments": seen * torch.stack([torch.ones(C, C), answers, answers**2 + 0.01])}
    return method.start(run, kept)


def stack(parts: list[Tensors]) -> Tensors:
    return {key: torch.stack([p[key] for p in parts]) for key in parts[0]}


def labels() -> Tensor:
    rng = np.random.default_rng(0)
    return torch.as_tensor(np.stack([rng.choice(np.flatnonzero(c), size=B) for c in COUNTS]))


def outputs(method: Method) -> int:
    """Logits of a sample in training."""
    return 2 * C if method.traits.classifier == "sparse_etf" else C


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: str(v))
def test_loss_and_its_gradient_agree(name: str, options: dict[str, Any]) -> None:
    method = METHODS.build(name, **options)
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(K, B, outputs(method), generator=rng).requires_grad_()
    teacher = torch.randn(K, B, C, generator=rng)
    weight = torch.ones(K, B)
    weight[1, -2:] = 0.0  # padding
    y = labels()
    const, state = zip(*(start(method, k) for k in range(K)), strict=True)

    together, new = method.loss(logits, Batch(y, weight, teacher), stack(list(const)), stack(list(state)))
    assert together.shape == (K, B)
    (grad,) = torch.autograd.grad((together * weight).sum(), [logits])
    for k in range(K):
        mine = logits[k].detach().clone().requires_grad_()
        alone, mine_new = method.loss(mine, Batch(y[k], weight[k], teacher[k]), const[k], state[k])
        assert close(together[k], alone)
        assert close(grad[k], torch.autograd.grad((alone * weight[k]).sum(), [mine])[0])
        assert new.keys() == mine_new.keys()
        for key, value in mine_new.items():
            assert close(new[key][k], value), key


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: str(v))
def test_direction_agrees_also_with_one_hyperparameter_per_client(name: str, options: dict[str, Any]) -> None:
    method = METHODS.build(name, **options)
    rng = torch.Generator().manual_seed(2)
    n_groups = method.group_count(C)
    grads = torch.randn(K, n_groups, D, generator=rng)
    x, x0 = torch.randn(K, D, generator=rng), torch.randn(D, generator=rng)
    const, state = zip(*(start(method, k) for k in range(K)), strict=True)
    hyper = {key: torch.tensor([value, value + 0.1, value + 0.2]) for key, value in method.hyper().items()}
    together, new = method.direction(
        LocalStep(grads, x, x0.expand(K, D), stack(list(const)), stack(list(state)), hyper)
    )
    assert together.shape == (K, D)
    for k in range(K):
        own = {key: float(value[k]) for key, value in hyper.items()}
        alone, mine_new = method.direction(LocalStep(grads[k], x[k], x0, const[k], state[k], own))
        assert close(together[k], alone)
        for key, value in mine_new.items():
            assert close(new[key][k], value), key


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: str(v))
def test_padding_changes_nothing(name: str, options: dict[str, Any]) -> None:
    method = METHODS.build(name, **options)
    rng = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(B, outputs(method), generator=rng), torch.randn(B, C, generator=rng)
    y, n = labels()[0], B - 2 if method.traits.views else B - 3
    weight = torch.ones(B)
    weight[n:] = 0.0
    const, state = start(method, 0)
    padded, padded_state = method.loss(logits, Batch(y, weight, teacher), const, state)
    short, short_state = method.loss(logits[:n], Batch(y[:n], weight[:n], teacher[:n]), const, state)
    assert close(padded[:n], short)
    for key, value in short_state.items():
        assert close(padded_state[key], value), key
