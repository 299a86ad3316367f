import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.core.momentum import cgnm_direction, normalized_sum

DOUBLE = torch.float64


def test_golden_first_and_second_step() -> None:
    zeros = torch.zeros(2, 2, dtype=DOUBLE)
    grads = torch.tensor([[3.0, 4.0], [0.0, 0.1]], dtype=DOUBLE)
    step, momentum = cgnm_direction(zeros, grads, 0.5, 0.1)
    torch.testing.assert_close(step, torch.tensor([0.576923, 0.769231 + 0.333333], dtype=DOUBLE), atol=1e-6, rtol=0)
    grads[1] = 0.0
    step, _ = cgnm_direction(momentum, grads, 0.5, 0.1)
    torch.testing.assert_close(step, torch.tensor([0.584416, 0.779221 + 0.2], dtype=DOUBLE), atol=1e-6, rtol=0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 1000))
def test_step_is_shorter_than_the_number_of_groups(h: int, d: int, seed: int) -> None:
    grads = 100 * torch.randn(h, d, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    step, _ = cgnm_direction(torch.zeros_like(grads), grads, 0.5, 0.1)
    assert torch.linalg.vector_norm(step) < h


@pytest.mark.parametrize("c", [1e-3, 7.0, 1e4])
def test_scaling_gradients_and_delta_together_changes_nothing(c: float) -> None:
    g = torch.Generator().manual_seed(0)
    m1 = m2 = torch.zeros(2, 6, dtype=DOUBLE)
    for _ in range(10):
        grads = torch.randn(2, 6, generator=g, dtype=DOUBLE)
        s1, m1 = cgnm_direction(m1, grads, 0.7, 0.1)
        s2, m2 = cgnm_direction(m2, c * grads, 0.7, 0.1 * c)
        torch.testing.assert_close(s1, s2)


def test_one_group_without_momentum_and_delta_is_normalized_sgd() -> None:
    g = torch.randn(1, 9, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    step, _ = cgnm_direction(torch.zeros_like(g), g, 0.0, 0.0)
    torch.testing.assert_close(step, g[0] / g.norm())


def test_zero_momentum_contributes_nothing_even_without_delta() -> None:
    assert torch.equal(normalized_sum(torch.zeros(3, 4), 0.0), torch.zeros(4))


def test_stale_momentum_of_an_absent_group_stays_near_unit_length_until_it_is_as_small_as_delta() -> None:
    momentum = torch.tensor([[50.0, 0.0]], dtype=DOUBLE)
    absent = torch.zeros(1, 2, dtype=DOUBLE)
    lengths = []
    for _ in range(12):
        step, momentum = cgnm_direction(momentum, absent, 0.5, 0.1)
        lengths.append(float(step.norm()))
    assert lengths[0] > 0.99 and lengths[-1] < 0.2
    step, _ = cgnm_direction(momentum, absent, 0.0, 0.1)
    assert torch.equal(step, torch.zeros(2, dtype=DOUBLE))


def test_leading_batch_dimensions_give_each_client_its_own_step() -> None:
    g = torch.Generator().manual_seed(2)
    momentum, grads = torch.randn(3, 2, 5, generator=g), torch.randn(3, 2, 5, generator=g)
    beta, delta = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.1, 0.2, 0.3])
    steps, _ = cgnm_direction(momentum, grads, beta, delta)
    for k in range(3):
        alone, _ = cgnm_direction(momentum[k], grads[k], float(beta[k]), float(delta[k]))
        torch.testing.assert_close(steps[k], alone)
