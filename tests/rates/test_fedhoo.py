from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.core.candidates import binary_patterns
from fedtail.core.random import generator
from fedtail.errors import FedtailError
from fedtail.rates import FedHOO, Setting
from fedtail.rates.fedhoo import additive_fit
from fedtail_experiments.rates.random_settle import RandomSettle

BEST = np.array([0.47, 0.63, 0.55, 0.71, 0.5])


def candidate_rates(probes: np.ndarray) -> np.ndarray:
    """(2^K, K) rates of every candidate. probes: (K, 2)."""
    bits = binary_patterns(len(probes))
    return np.where(bits == 1, probes[:, 1], probes[:, 0])


def search(
    strategy: FedHOO, reward: Callable[[np.ndarray, int], np.ndarray], rounds: int = 100
) -> tuple[list[int], list[int]]:
    """Depths of the selected boxes and the winners, until the search is done."""
    depths, winners = [], []
    for t in range(rounds):
        if strategy.done:
            break
        depths.append(strategy.stats()["node_depth"])
        winners.append(strategy.tell(reward(candidate_rates(strategy.ask()), t)))
    return depths, winners


def quadratic(rates: np.ndarray, t: int) -> np.ndarray:
    return 1 - ((rates - BEST[: rates.shape[1]]) ** 2).sum(axis=1)


def test_two_clients_follow_the_worked_example() -> None:
    strategy = FedHOO(2, 0.0, 1.0, cold_rounds=0)
    np.testing.assert_array_equal(strategy.ask(), [[0.25, 0.75]] * 2)
    assert strategy.tell([0.0, 0.0, 1.0, 0.0]) == 2  # s = (0, 1): client 1 takes the upper probe
    np.testing.assert_array_equal(strategy.rates, [0.25, 0.75])
    np.testing.assert_array_equal(strategy.choice, [0, 1])
    np.testing.assert_array_equal(strategy.ask(), [[0.125, 0.375], [0.625, 0.875]])  # of [0, .5] x [.5, 1]


@pytest.mark.parametrize("reward", ["raw", "drift"])
@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_five_clients_without_noise_give_the_golden_trace(reward: str, drift: float) -> None:
    strategy = FedHOO(5, reward=reward)
    depths, winners = search(strategy, lambda r, t: quadratic(r, t) + drift * t)
    assert depths == [0, 0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert winners[-1] == 29
    np.testing.assert_allclose(strategy.rates, [0.471875, 0.628125, 0.546875, 0.709375, 0.496875], atol=1e-12)
    stats = strategy.stats()
    assert (stats["nodes"], stats["rounds"], stats["stopped"]) == (161, 12, "stable")


@given(st.integers(0, 2**32 - 1), st.floats(-1.0, 1.0))
def test_with_drift_correction_a_constant_per_round_never_changes_the_search(seed: int, slope: float) -> None:
    rng = np.random.default_rng(seed)
    plain, shifted = FedHOO(3, reward="drift"), FedHOO(3, reward="drift")
    for t in range(30):
        if plain.done:
            break
        noise = 0.05 * rng.standard_normal(8)
        a = plain.tell(quadratic(candidate_rates(plain.ask()), t) + noise)
        b = shifted.tell(quadratic(candidate_rates(shifted.ask()), t) + noise + slope * t)
        assert a == b
        np.testing.assert_array_equal(plain.ask(), shifted.ask())


def test_identical_candidates_choose_the_first() -> None:
    for select in ("joint", "main_effect"):
        strategy = FedHOO(4, cold_rounds=0, select=select)
        assert strategy.tell(np.full(16, 0.7)) == 0


def test_cold_rounds_adopt_the_best_candidate_and_record_nothing() -> None:
    strategy = FedHOO(2, cold_rounds=2)
    probes = strategy.ask()
    for _ in range(2):
        assert strategy.stats()["phase"] == "cold"
        assert strategy.tell([0.1, 0.9, 0.2, 0.3]) == 1
        np.testing.assert_array_equal(strategy.ask(), probes)
        assert strategy.stats()["nodes"] == 1
    strategy.tell([0.1, 0.9, 0.2, 0.3])
    assert strategy.stats()["nodes"] == 5


def test_a_box_at_the_depth_cap_stays_a_leaf() -> None:
    strategy = FedHOO(1, max_depth=2, cold_rounds=0, stable_rounds=100)
    for t in range(10):
        strategy.tell([0.2, 0.1])
        assert strategy.stats()["nodes"] == min(1 + 2 * (t + 1), 5)
    assert strategy.stats()["depth"] == 2


def test_the_search_ends_at_the_round_limit_and_then_asks_for_one_probe() -> None:
    rng = np.random.default_rng(0)
    strategy = FedHOO(2, max_rounds=6, stable_rounds=50)
    search(strategy, lambda r, t: rng.random(4))
    assert strategy.done and strategy.stats()["stopped"] == "limit" and strategy.stats()["rounds"] == 6
    assert strategy.choice.max() <= 1
    np.testing.assert_array_equal(strategy.ask(), strategy.rates[:, None])
    rates = strategy.rates
    assert strategy.patterns() is None and strategy.tell() == 0
    np.testing.assert_array_equal(strategy.choice, [0, 0])
    np.testing.assert_array_equal(strategy.rates, rates)


def test_the_equation_reading_explores_more_boxes_than_the_pseudocode() -> None:
    def shallow_rounds(score: str, **more: float) -> int:
        rng = np.random.default_rng(3)
        strategy = FedHOO(3, score=score, cold_rounds=0, stable_rounds=1000, max_rounds=30, **more)
        depths, _ = search(strategy, lambda r, t: quadratic(r, t) + 0.02 * rng.standard_normal(8))
        return sum(d < 5 for d in depths)

    assert shallow_rounds("equation", alpha=4.0) > shallow_rounds("pseudocode")


def test_main_effects_find_the_rates_better_than_single_candidates_under_noise() -> None:
    def error(select: str, seed: int) -> float:
        rng = np.random.default_rng(seed)
        strategy = FedHOO(5, select=select)
        search(strategy, lambda r, t: quadratic(r, t) + 0.02 * rng.standard_normal(32))
        return float(np.abs(strategy.rates - BEST).mean())

    joint, effects = (np.mean([error(s, seed) for seed in range(20)]) for s in ("joint", "main_effect"))
    assert effects < 0.75 * joint


def test_the_additive_fit_reproduces_additive_rewards_and_averages_the_rest() -> None:
    bits = binary_patterns(3)
    additive = 0.3 + bits @ [0.1, -0.2, 0.05]
    np.testing.assert_allclose(additive_fit(additive, 3), additive, atol=1e-12)
    interaction = 0.1 * (2 * bits[:, 0] - 1) * (2 * bits[:, 1] - 1)
    np.testing.assert_allclose(additive_fit(additive + interaction, 3), additive, atol=1e-12)


def test_a_missing_client_keeps_its_rate_and_its_interval() -> None:
    strategy = FedHOO(3, 0.0, 1.0, cold_rounds=0)
    strategy.tell(quadratic(candidate_rates(strategy.ask()), 0))
    rate, probes = strategy.rates[1], strategy.ask()[1]
    rewards = np.array([1.1, 1.2, 1.1, 1.2, 1.3, 1.4, 1.3, 1.4])  # no difference along axis 1
    strategy.tell(rewards, present=np.array([True, False, True]))
    assert strategy.rates[1] == rate
    np.testing.assert_array_equal(strategy.ask()[1], probes)
    assert np.all(np.ptp(strategy.ask()[[0, 2]], axis=1) < np.ptp(probes))
    stats = strategy.stats()
    assert stats["missing"] == [1] and stats["missing_rounds"] == 1 and stats["nodes"] == 1 + 8 + 4
    strategy.tell(np.arange(8.0))
    assert strategy.stats()["missing"] == [] and strategy.stats()["nodes"] == 1 + 8 + 4 + 8


def test_a_client_that_is_often_missing_still_ends_in_a_search() -> None:
    rng = np.random.default_rng(0)
    strategy = FedHOO(3)
    while not strategy.done:
        rates = candidate_rates(strategy.ask())
        present = np.array([True, True, rng.random() < 0.5])
        if not present[2]:
            rates[:, 2] = rates[0, 2]
        strategy.tell(quadratic(rates, 0), present=present)
    assert np.abs(strategy.rates - BEST[:3]).max() < 0.03


def test_other_quantities_are_searched_on_a_logarithmic_scale() -> None:
    strategy = FedHOO(2, 1e-3, 1.0, searches="lr", log=True, base_rate=[0.5, 0.7], cold_rounds=0)
    np.testing.assert_allclose(strategy.ask()[0], [10**-2.25, 10**-0.75])
    np.testing.assert_array_equal(strategy.base_rates, [0.5, 0.7])
    best = np.array([0.02, 0.3])
    search(strategy, lambda r, t: -((np.log(r) - np.log(best)) ** 2).sum(axis=1))
    np.testing.assert_allclose(strategy.rates, best, rtol=0.15)


@given(st.integers(1, 5), st.integers(0, 40), st.sampled_from(["raw", "drift"]), st.integers(0, 10**6))
def test_saved_at_any_round_the_search_goes_on_identically(k: int, cut: int, reward: str, seed: int) -> None:
    def told(strategy: FedHOO, t: int) -> int:
        rng = np.random.default_rng((seed, t))
        present = rng.random(k) < 0.8
        present[rng.integers(k)] = True
        return strategy.tell(rng.random(2**k), present=present)

    one = FedHOO(k, reward=reward, score="equation" if seed % 2 else "pseudocode")
    two = FedHOO(k, reward=reward, score=one.score)
    for t in range(cut):
        told(one, t)
    two.load_state(json.loads(json.dumps(one.state())))
    for t in range(cut, cut + 8):
        np.testing.assert_array_equal(one.ask(), two.ask())
        assert told(one, t) == told(two, t) if not one.done else two.done
        assert one.state() == two.state() and one.stats() == two.stats()


def test_many_clients_warn_with_the_cost_and_too_many_are_refused() -> None:
    with pytest.warns(UserWarning, match="256 models in every search round, 8 times"):
        FedHOO(8)
    with pytest.raises(FedtailError, match=r"2\^13 = 8,192 models.*fedhoo_clusters"):
        FedHOO(13)


def test_partial_participation_is_refused_with_the_way_out() -> None:
    with pytest.raises(FedtailError, match=r"participation = 0.5.*fedhoo_clusters"):
        FedHOO(5).begin(Setting(10, 0.5, np.ones(5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.8, "high": 0.4}, "rates.high = 0.4"),
        ({"score": "ucb"}, "rates.score 'ucb' is unknown"),
        ({"reward": "drfit"}, "did you mean 'drift'"),
        ({"ema": 0.0}, "rates.ema"),
        ({"base_rate": [0.1, 0.2]}, "rates.base_rate has 2 values for 3 clients"),
        ({"low": 0.0, "log": True}, "rates.low"),
    ],
)
def test_bad_options_are_one_clear_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(FedtailError, match=message):
        FedHOO(3, **options)  # type: ignore[arg-type]


def test_wrong_rewards_are_refused() -> None:
    with pytest.raises(FedtailError, match="needs 8 rewards"):
        FedHOO(3).tell([0.1, 0.2])
    with pytest.raises(FedtailError, match="non-finite"):
        FedHOO(1).tell([0.1, float("nan")])


# -- the moving average, and the noise control -----------------------------------------------------------------


def test_a_childs_value_is_a_moving_average_down_its_branch() -> None:
    # the paper's implementation details, by hand: a = 0.25, two rounds on one axis
    search = FedHOO(1, low=0.0, high=1.0, cold_rounds=0, ema=0.25)
    search.tell([0.2, 0.6])
    state = search.state()
    assert state["value"] == pytest.approx([0.4, 0.2, 0.6])  # the root had no value: its children take their rewards
    assert state["node"] == 2
    search.tell([0.8, 0.4])
    # children of the upper half: 0.75 * 0.6 + 0.25 * R; the path moves a quarter of the way to the round's mean, 0.6
    assert search.state()["value"] == pytest.approx([0.45, 0.2, 0.6, 0.65, 0.55])
    assert search.state()["node"] == 3


def test_with_a_short_memory_the_search_goes_back_to_an_older_box() -> None:
    def second_box(ema: float) -> float:
        search = FedHOO(1, low=0.0, high=1.0, cold_rounds=0, ema=ema)
        search.tell([0.58, 0.6])
        search.tell([0.5, 0.4])  # worse than the other half was
        return float(search.ask().mean())

    assert second_box(1.0) == 0.25  # the lower half, 0.58, against 0.5
    assert second_box(0.1) == 0.625  # 0.9 * 0.6 + 0.1 * 0.5 = 0.59 still beats it


@pytest.mark.parametrize("option", ["tau", "alpha"])
def test_an_option_without_effect_says_so(option: str) -> None:
    with pytest.warns(UserWarning, match=f"rates.{option} = 3 has no effect"):
        FedHOO(2, **{option: 3.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedHOO(2, tau=0.01, alpha=1.0)  # what version 0.1 wrote into every config
        FedHOO(2, **{option: 3.0}, score="equation")


@pytest.mark.parametrize(
    "option",
    [
        {"ema": 1.0}, {"reward": "drift"}, {"select": "main_effect"}, {"score": "equation"}, {"cold_rounds": 0},
        {"stable_rounds": 2}, {"max_depth": 3}, {"max_rounds": 6}, {"tau": 0.5, "score": "equation"},
        {"alpha": 20.0, "score": "equation"},
    ],
    ids=lambda option: "-".join(option),
)  # fmt: skip
def test_every_option_can_change_a_noisy_search(option: dict) -> None:
    def found(seed: int, rise: float, **options: object) -> tuple:
        rng, strategy = np.random.default_rng(seed), FedHOO(3, **options)
        search(strategy, lambda r, t: quadratic(r, t) - rise * np.exp(-t / 15) + 0.03 * rng.standard_normal(len(r)), 30)
        return strategy.rates.tolist(), strategy.stats()["rounds"]

    base = {"score": "equation"} if len(option) > 1 else {}
    assert any(found(s, rise, **option) != found(s, rise, **base) for s in range(6) for rise in (0.0, 0.5))


def test_the_noise_control_does_what_fedhoo_does_with_shuffled_rewards() -> None:
    rng, seed = np.random.default_rng(0), 3
    control, twin = RandomSettle(3), FedHOO(3, reward="drift")
    control.begin(Setting(60, 1.0, np.ones(3), seed=seed))
    rewards = [1 - ((r - 0.5) ** 2).sum() + 0.001 * rng.standard_normal(8) for r in rng.random((40, 3))]
    t = 0
    while not control.done:
        np.testing.assert_array_equal(control.ask(), twin.ask())
        shuffled = generator(seed, "random_settle", round=t).permutation(rewards[t])
        assert control.tell(rewards[t]) == twin.tell(shuffled)
        t += 1
    assert twin.done and control.stats() == twin.stats()
    np.testing.assert_array_equal(control.rates, twin.rates)
    assert control.tell(None) == 0


def test_the_noise_control_learns_nothing_and_differs_between_seeds() -> None:
    best, ends = np.array([0.45, 0.55, 0.65, 0.75, 0.5]), []
    for seed in range(30):
        control = RandomSettle(5)
        control.begin(Setting(60, 1.0, np.ones(5), seed=seed))
        while not control.done:
            probes = control.ask()
            taken = probes[np.arange(5), (np.arange(32)[:, None] >> np.arange(5)) & 1]
            control.tell(1 - ((taken - best) ** 2).sum(1))
        ends.append(control.rates)
    np.testing.assert_allclose(np.mean(ends, axis=0), 0.6, atol=0.07)  # the middle of the range, wherever the best is
    assert np.std(ends) == pytest.approx(0.4 / 12**0.5, abs=0.03)


def test_rounds_count_as_stable_from_one_halving_above_the_cap_on() -> None:
    """Where the upper end always wins, nested boxes adopt rates in the same cell of the finest grid before that too."""
    strategy = FedHOO(2, 0.0, 1.0, cold_rounds=0, max_depth=4, stable_rounds=3, max_rounds=40)
    seen = []
    while not strategy.done:
        depth = strategy.stats()["node_depth"]
        strategy.tell(np.arange(4.0))
        seen.append((depth, strategy.stats()["stable_rounds"]))
    assert seen == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (4, 3)]
    assert strategy.stats()["stopped"] == "stable"


def test_a_round_counts_as_many_visits_as_models_of_the_clients_that_were_there() -> None:
    strategy = FedHOO(3, cold_rounds=0)
    strategy.tell(np.arange(8.0))
    assert strategy.state()["visits"][0] == 8
    strategy.tell(np.arange(8.0), present=np.array([True, False, True]))
    assert strategy.state()["visits"][0] == 8 + 4
