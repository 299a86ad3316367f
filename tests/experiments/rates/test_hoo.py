from __future__ import annotations

import json

import numpy as np
import pytest

from fedtail.errors import FedtailError
from fedtail.rates import Setting
from fedtail_experiments.rates.hoo import HOO

# PyXAB 0.3.0, T_HOO(rounds=100, domain=[[.4, .8]] * 2, DimensionBinaryPartition), reward 1 - sum (x - .55)^2. The first
# seven as released, the rest with its shared list of children copied (see rates/hoo.py).
PULLS = """.7 .7  .5 .7  .7 .5  .5 .5  .55 .55  .55 .75  .75 .55
.75 .75  .45 .55  .45 .75  .65 .55  .65 .75  .55 .45  .75 .45  .55 .65  .75 .65  .45 .45  .45 .65  .65 .45  .65 .65
.575 .575  .575 .675  .675 .575  .675 .675  .475 .575  .475 .675  .675 .475  .675 .775  .575 .475  .575 .775
.775 .575  .775 .675  .475 .475  .475 .775  .775 .475  .775 .775  .525 .575  .525 .675  .625 .575  .625 .675"""


def pull(strategy: HOO) -> np.ndarray:
    point = strategy.ask()[:, 0]
    strategy.tell(np.array([1 - ((point - 0.55) ** 2).sum()]))
    return point


def test_pulls_equal_those_of_pyxab() -> None:
    strategy = HOO(2, rounds=100)
    golden = np.array(PULLS.split(), dtype=float).reshape(-1, 2)
    np.testing.assert_allclose([pull(strategy) for _ in range(len(golden))], golden, atol=1e-12)


def test_rates_are_those_of_the_round_until_the_horizon_and_near_the_best_after_it() -> None:
    strategy = HOO(2, rounds=100)
    while not strategy.done:
        point = pull(strategy)
        if not strategy.done:
            np.testing.assert_array_equal(strategy.rates, point)
    assert np.abs(strategy.rates - 0.55).max() < 0.1
    assert strategy.patterns() is None and strategy.ask().shape == (2, 1)


def test_the_horizon_is_the_length_of_the_run_unless_given() -> None:
    strategy = HOO(2)
    strategy.begin(Setting(3, 1.0, np.ones(2)))
    for _ in range(3):
        assert not strategy.done
        pull(strategy)
    assert strategy.done


@pytest.mark.parametrize("cut", [0, 1, 17])
def test_saved_at_any_round_the_search_goes_on_identically(cut: int) -> None:
    one, two = HOO(3, rounds=50), HOO(3, rounds=50)
    for _ in range(cut):
        pull(one)
    two.load_state(json.loads(json.dumps(one.state())))
    for _ in range(12):
        np.testing.assert_array_equal(pull(one), pull(two))


def test_a_round_with_missing_clients_teaches_nothing() -> None:
    strategy = HOO(2, rounds=20)
    point = strategy.ask()
    strategy.tell(np.array([0.9]), present=np.array([True, False]))
    np.testing.assert_array_equal(strategy.ask(), point)


def test_partial_participation_is_refused() -> None:
    with pytest.raises(FedtailError, match=r"participation = 0.1"):
        HOO(3).begin(Setting(10, 0.1, np.ones(3)))


def test_every_pull_counts_once_for_each_box_around_it() -> None:
    strategy, got = HOO(2, rounds=50), []
    for _ in range(20):
        point = strategy.ask()[:, 0]
        got.append(1 - float(((point - 0.55) ** 2).sum()))
        strategy.tell(np.array([got[-1]]))
    kept = strategy.state()
    assert kept["visited"][0] == 0 and kept["visits"][0] == 20 and kept["total"][0] == pytest.approx(sum(got))
    assert sum(n for box, n in zip(kept["visited"], kept["visits"], strict=True) if box in range(1, 5)) == 20
