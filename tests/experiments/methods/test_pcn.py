from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtail.methods import FedCGN, LocalRun, Method
from fedtail.methods.base import LocalStep
from fedtail_experiments.methods.pcn import PCN, PCNO


def direction(method: Method, grads: torch.Tensor) -> torch.Tensor:
    n_groups, d = grads.shape
    run = LocalRun(0, 0, np.ones(n_groups, dtype=int), np.ones(n_groups, dtype=int), d, 1, 0.1, {})
    const, state = method.start(run, {})
    return method.direction(LocalStep(grads, torch.zeros(d), torch.zeros(d), const, state, method.hyper()))[0]


def test_the_step_is_the_authors_sum_of_normalised_class_gradients() -> None:
    # PCNGD-Algorithms 3eb4ef0, CodeBlocks.py: every parameter's gradient over (norm of all parameters + 1e-6)
    grads = np.random.default_rng(0).standard_normal((4, 9))
    want = sum(g / (np.sqrt((g**2).sum()) + 1e-6) for g in grads)
    got = direction(PCN(), torch.as_tensor(grads, dtype=torch.float32))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


def test_the_scale_of_a_class_does_not_matter() -> None:
    grads = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    scaled = grads * torch.tensor([1.0, 100.0, 7.0]).view(3, 1)
    torch.testing.assert_close(direction(PCN(), grads), direction(PCN(), scaled), rtol=1e-5, atol=1e-5)


def test_the_step_is_at_most_as_long_as_there_are_classes() -> None:
    grads = torch.ones(6, 4) * 50
    assert float(torch.linalg.vector_norm(direction(PCN(), grads))) == pytest.approx(6.0, abs=1e-5)
    assert PCN().bound(0.1, 3, 6) == pytest.approx(0.1 * 3 * 6)


def test_two_opposite_classes_cancel() -> None:
    g = torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(direction(PCN(), torch.stack([g, -5 * g])), torch.zeros(3), atol=1e-5, rtol=0)


def test_fedcgn_with_a_group_per_class_takes_the_same_step() -> None:
    grads = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    assert torch.equal(direction(FedCGN(n_groups=None, delta=1e-6), grads), direction(PCN(), grads))


def test_an_absent_class_contributes_nothing() -> None:
    grads = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    grads[1] = 0.0
    torch.testing.assert_close(direction(PCN(), grads), direction(PCN(), grads[[0, 2]]))


def test_samplers() -> None:
    assert (PCN().sampler, PCNO().sampler, FedCGN().sampler) == ("stratified", "balanced", "shuffled")
