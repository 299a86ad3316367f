from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtail.errors import FedtailError
from fedtail.methods import FedAvg
from fedtail.rounds.evaluation import judged
from fedtail_experiments.rates.fast import FAST
from fedtail_experiments.rates.locally_optimal import LocallyOptimal
from tests.methods.federations import awkward_federation, problem, train


def gains_for(best: np.ndarray, rates: np.ndarray) -> dict[str, np.ndarray]:
    return {"local_gain": (0.9 - np.abs(rates - best))[:, None]}


def test_one_arm_is_a_uniform_rate() -> None:
    strategy = FAST(3, arms=[0.5])
    for _ in range(4):
        np.testing.assert_array_equal(strategy.ask(), np.full((3, 1), 0.5))
        strategy.tell(reports={"local_gain": np.ones((3, 1))})
    np.testing.assert_array_equal(strategy.rates, np.full(3, 0.5))


def test_every_arm_is_played_once_in_each_clients_own_order() -> None:
    strategy = FAST(6, seed=1)
    played = []
    for _ in range(5):
        played.append(strategy.ask()[:, 0])
        strategy.tell(reports={"local_gain": np.full((6, 1), 0.1)})
    np.testing.assert_allclose(np.sort(np.stack(played), axis=0), np.tile([[0.4], [0.5], [0.6], [0.7], [0.8]], 6))
    assert len({tuple(column) for column in np.stack(played).T}) > 1


def test_a_clear_best_arm_is_found_soon_after_the_first_plays() -> None:
    strategy = FAST(1)
    plays = []
    for _ in range(40):
        rate = strategy.ask()[0, 0]
        plays.append(rate)
        strategy.tell(reports={"local_gain": np.array([[1.0 if rate == 0.7 else 0.0]])})
    assert plays[5] == 0.7
    assert np.mean(np.array(plays) == 0.7) > 0.5
    assert strategy.stats()["best_arm"] == [0.7]


def test_a_client_plays_the_same_whatever_the_others_see() -> None:
    one, two = FAST(2), FAST(2)
    for t in range(12):
        assert one.ask()[0, 0] == two.ask()[0, 0]
        one.tell(reports={"local_gain": np.array([[0.1 * (t % 3)], [0.9]])})
        two.tell(reports={"local_gain": np.array([[0.1 * (t % 3)], [0.1 * (t % 5)]])})


def test_an_absent_client_keeps_its_arm_and_its_rate() -> None:
    strategy = FAST(2)
    strategy.tell(reports={"local_gain": np.array([[0.2], [0.3]])})
    rate, arm = strategy.rates[1], strategy.ask()[1, 0]
    strategy.tell(reports={"local_gain": np.array([[0.2], [np.nan]])}, present=np.array([True, False]))
    assert strategy.rates[1] == rate and strategy.ask()[1, 0] == arm


def test_discounting_notices_sooner_that_the_best_arm_has_changed() -> None:
    def rounds_to_notice(discount: float) -> int:
        strategy = FAST(1, arms=[0.4, 0.8], discount=discount)
        for t in range(400):
            best = 0.4 if t < 100 else 0.8
            if t > 100 and strategy.stats()["best_arm"] == [0.8]:
                return t - 100
            strategy.tell(reports={"local_gain": np.array([[float(strategy.ask()[0, 0] == best)]])})
        return 300

    assert rounds_to_notice(0.9) < 0.5 * rounds_to_notice(1.0)


def test_locally_optimal_tries_all_arms_once_after_the_cold_rounds_and_keeps_the_best() -> None:
    strategy = LocallyOptimal(2)
    for _ in range(3):
        np.testing.assert_array_equal(strategy.ask(), np.full((2, 1), 0.6))
        strategy.tell()
    assert strategy.ask().shape == (2, 5)
    accuracy = np.array([[0.1, 0.5, 0.5, 0.4, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5]])
    strategy.tell(reports={"local_validation": accuracy})
    np.testing.assert_array_equal(strategy.choice, [1, 4])  # ties go to the lowest rate
    np.testing.assert_allclose(strategy.rates, [0.5, 0.8])
    assert strategy.done and strategy.ask().shape == (2, 1)
    strategy.tell()
    np.testing.assert_array_equal(strategy.choice, [0, 0])


def test_a_client_absent_from_the_trials_tries_when_it_is_back() -> None:
    strategy = LocallyOptimal(2, arms=[0.2, 0.8], cold_rounds=0)
    strategy.tell(reports={"local_validation": np.array([[0.9, 0.1], [np.nan, np.nan]])}, present=np.array([1, 0]))
    assert not strategy.done
    np.testing.assert_allclose(strategy.ask(), [[0.2, 0.2], [0.2, 0.8]])
    strategy.tell(reports={"local_validation": np.array([[0.1, 0.9], [0.2, 0.3]])})
    assert strategy.done
    np.testing.assert_allclose(strategy.rates, [0.2, 0.8])


def test_empty_arms_are_refused() -> None:
    with pytest.raises(FedtailError, match=r"rates\.arms is empty"):
        FAST(2, arms=[])


def test_a_client_without_validation_samples_keeps_the_middle_arm_and_holds_nobody_up() -> None:
    strategy = LocallyOptimal(2, arms=[0.2, 0.5, 0.8], cold_rounds=0)
    strategy.tell(
        reports={"local_validation": np.array([[0.1, 0.2, 0.9], [np.nan, np.nan, np.nan]])}, present=np.array([1, 1])
    )
    assert strategy.done
    np.testing.assert_array_equal(strategy.choice, [2, 1])
    np.testing.assert_allclose(strategy.rates, [0.8, 0.5])


def test_nobody_with_validation_samples_is_an_error() -> None:
    strategy = LocallyOptimal(2, cold_rounds=0)
    with pytest.raises(FedtailError, match="no validation data"):
        strategy.tell(reports={"local_validation": np.full((2, 5), np.nan)}, present=np.array([1, 1]))


def test_a_client_judges_its_models_by_the_metric_of_the_run() -> None:
    def logits(confusion: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        cells = [(true, guess) for true in (0, 1) for guess in (0, 1) for _ in range(confusion[true][guess])]
        return [(torch.eye(2)[[guess for _, guess in cells]], torch.tensor([true for true, _ in cells]))]

    lazy, fair = logits([[90, 0], [10, 0]]), logits([[70, 20], [2, 8]])
    assert judged(lazy, "accuracy", 2) > judged(fair, "accuracy", 2)
    # recalls 1 and 0 against 70/90 and 8/10
    assert judged(lazy, "balanced_accuracy", 2) == 0.5
    assert judged(fair, "balanced_accuracy", 2) == pytest.approx((70 / 90 + 0.8) / 2)
    assert judged(fair, "false_alarm_rate", 2, 0) == pytest.approx(1 / (1 + 20 / 90))  # higher is better
    assert judged(fair, "pr_auc", 2) > judged(lazy, "pr_auc", 2)
    assert np.isnan(judged([], "accuracy", 2))


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_reports_of_local_validation_follow_the_metric(path: str) -> None:
    seen = {}
    for metric in ("accuracy", "macro_f1"):
        made = problem(
            FedAvg(),
            awkward_federation(validation=0.4),
            path=path,
            metric=metric,
            rates=LocallyOptimal(5, cold_rounds=0),
        )
        tell, heard = made.rates.tell, []
        made.rates.tell = lambda *a, heard=heard, tell=tell, **k: (heard.append(k["reports"]), tell(*a, **k))[1]  # type: ignore[method-assign]
        train(made, 1)
        seen[metric] = heard[0]["local_validation"][0]
    assert not np.allclose(seen["accuracy"], seen["macro_f1"])
