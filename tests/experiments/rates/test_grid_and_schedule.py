from __future__ import annotations

import numpy as np
import pytest

from fedtail.errors import FedtailError
from fedtail.rates import Setting
from fedtail_experiments.rates.grid import Grid
from fedtail_experiments.rates.schedule import Schedule


def test_grid_finds_the_best_uniform_rate_although_accuracy_rises() -> None:
    strategy = Grid(3, grid=[0.2, 0.5, 0.8], rounds=4, cold_rounds=1)
    rng = np.random.default_rng(0)
    assert strategy.ask().shape == (3, 1) and strategy.patterns() is None
    strategy.tell()
    for t in range(4):
        assert strategy.patterns() == "uniform" and strategy.ask().shape == (3, 3)
        winner = strategy.tell(np.array([0.5, 0.56, 0.52]) + 0.1 * t + 0.01 * rng.standard_normal(3))
        assert (strategy.choice == winner).all()
    assert strategy.done
    np.testing.assert_allclose(strategy.ask(), np.full((3, 1), 0.5))


def test_grid_ties_go_to_the_lowest_rate() -> None:
    strategy = Grid(2, grid=[0.8, 0.4], rounds=1, cold_rounds=0)
    assert strategy.tell(np.array([0.5, 0.5])) == 0
    np.testing.assert_allclose(strategy.rates, [0.4, 0.4])


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("convex", 0.2929), ("concave", 0.7071), ("step", 1.0)]
)
def test_schedules_run_from_start_to_end(shape: str, middle: float) -> None:
    strategy = Schedule(2, start=0.0, end=1.0, shape=shape)
    strategy.begin(Setting(11, 1.0, np.ones(2)))
    seen = []
    for _ in range(12):
        seen.append(strategy.ask()[0, 0])
        strategy.tell()
        assert strategy.rates[0] == seen[-1]
    assert seen[0] == 0.0 and seen[10] == seen[11] == 1.0
    np.testing.assert_allclose(seen[5], middle, atol=1e-4)
    assert strategy.done


def test_a_schedule_may_end_before_the_run_and_may_fall() -> None:
    strategy = Schedule(1, start=0.8, end=0.4, rounds=3)
    strategy.begin(Setting(100, 1.0, np.ones(1)))
    rates = []
    for _ in range(5):
        rates.append(strategy.ask()[0, 0])
        strategy.tell()
    np.testing.assert_allclose(rates, [0.8, 0.6, 0.4, 0.4, 0.4])


def test_a_schedule_outside_a_run_needs_its_length() -> None:
    with pytest.raises(FedtailError, match=r"rates\.rounds"):
        Schedule(2).ask()
