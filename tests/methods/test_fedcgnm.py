"""FedCGNM's step by hand, and over a whole local run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtail.errors import FedtailError
from fedtail.methods import METHODS, FedCGN, FedCGNM, LocalRun
from fedtail.methods.base import LocalStep
from tests.methods.federations import problem, train


def steps(method: FedCGNM, gradients: np.ndarray) -> np.ndarray:
    """(T, d) directions of T steps on (T, H, d) group gradients."""
    _, n_groups, d = gradients.shape
    n = np.ones(max(n_groups, 2), dtype=int)
    const, state = method.start(LocalRun(0, 0, n, n, d, len(gradients), 0.1, {}), {})
    out = []
    for g in torch.as_tensor(gradients, dtype=torch.float32):
        step, state = method.direction(LocalStep(g, torch.zeros(d), torch.zeros(d), const, state, method.hyper()))
        out.append(step.numpy())
    return np.array(out)


def test_golden_steps() -> None:
    both, alone = np.array([[3.0, 4.0], [0.0, 0.1]]), np.array([[3.0, 4.0], [0.0, 0.0]])
    first, second = steps(FedCGNM(), np.stack([both, alone]))
    np.testing.assert_allclose(first, [0.576923, 0.769231 + 0.333333], atol=1e-6)
    np.testing.assert_allclose(second, [0.584416, 0.779221 + 0.2], atol=1e-6)


def test_at_natural_length_groups_weigh_the_same_and_a_step_is_as_long_as_gradients_are() -> None:
    g = np.array([[[3.0, 4.0], [0.0, 0.1]]])
    method = FedCGNM(length="natural", beta=0.0, delta=0.0)
    mean = (5.0 + 0.1) / 2
    np.testing.assert_allclose(steps(method, g)[0], [0.6 * mean, 0.8 * mean + mean], rtol=1e-5)
    np.testing.assert_allclose(steps(method, 10 * g), 10 * steps(method, g), rtol=1e-5)
    np.testing.assert_array_equal(steps(method, 0 * g), 0 * g[:, 0])
    assert method.bound(0.1, 5, 3) is None


def test_a_length_that_there_is_not_is_refused() -> None:
    with pytest.raises(FedtailError, match=r"method\.length"):
        FedCGNM(length="long")


def test_one_group_without_momentum_or_stabiliser_is_normalised_gradient_descent() -> None:
    g = np.random.default_rng(0).standard_normal((3, 1, 5))
    got = steps(FedCGN(n_groups=1, delta=0.0), g)
    np.testing.assert_allclose(got, g[:, 0] / np.linalg.norm(g[:, 0], axis=1, keepdims=True), rtol=1e-5)


@given(st.floats(0.01, 100.0), st.floats(0.0, 0.95))
def test_scaling_gradients_and_delta_together_changes_nothing(c: float, beta: float) -> None:
    g = np.random.default_rng(1).standard_normal((4, 2, 6))
    np.testing.assert_allclose(
        steps(FedCGNM(beta=beta, delta=0.1 * c), c * g), steps(FedCGNM(beta=beta, delta=0.1), g), rtol=1e-4, atol=1e-5
    )


def test_a_round_moves_a_client_less_than_lr_steps_groups() -> None:
    method, seen = FedCGNM(n_groups=3), []
    made = problem(method, epochs=2)
    run = made.engine.train

    def spy(task):
        updates, refusals = run(task)
        for u in updates:
            seen.append(float(torch.linalg.vector_norm(u.delta[0])) / (task.lr * u.steps[0] * 3))
        return updates, refusals

    made.engine.train = spy  # type: ignore[method-assign]
    train(made, 2)
    assert len(seen) == 10 and max(seen) < 1.0
    assert method.bound(0.1, 7, 4) == pytest.approx(0.1 * 7 * 3)
    assert FedCGNM(weight_decay=0.1).bound(0.1, 7, 4) is None


def test_a_threshold_makes_the_rarest_classes_the_minority() -> None:
    groups = FedCGNM(threshold=2).groups(np.array([5, 50, 7, 20]))
    assert groups.tolist() == [1, 0, 1, 0]
    with pytest.raises(FedtailError, match="threshold"):
        FedCGNM(threshold=2, n_groups=3)


@pytest.mark.parametrize("threshold", [4, 5, 7])
def test_a_threshold_beyond_the_classes_puts_all_of_them_into_the_minority(threshold: int) -> None:
    assert FedCGNM(threshold=threshold).groups(np.array([5, 50, 7, 20])).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("options", [{"beta": 1.0}, {"delta": -0.1}, {"n_groups": 0}])
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(FedtailError, match=next(iter(options))):
        METHODS.build("fedcgnm", **options)
