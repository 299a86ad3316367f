"""What every rate strategy must do, whatever it searches for."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES, RateStrategy, Setting
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem, State
from fedtail.settings import Settings
from fedtail.simulate import simulator
from tests.conftest import blob_federation

OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"rates": [0.1, 0.5, 0.9, 0.3]},
    "fedhoo": {"cold_rounds": 1, "max_rounds": 4},
    "fedhoo_clusters": {"clusters": 2, "cold_rounds": 1, "max_rounds": 4},
    "random_settle": {"cold_rounds": 1, "max_rounds": 4},
    "locally_optimal": {"cold_rounds": 1, "arms": [0.2, 0.6, 0.8]},
    "grid": {"cold_rounds": 1, "rounds": 2, "grid": [0.2, 0.6, 0.8]},
    "hoo": {"rounds": 5},
}
K, ROUNDS = 4, 6
ALL = sorted(RATES)


def build(name: str) -> RateStrategy:
    return RATES.build(name, K, **OPTIONS.get(name, {}))


def problem(strategy: RateStrategy) -> Problem:
    federation = blob_federation(K)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    method = METHODS.build("fedcgnm")
    engine = simulator(federation, module, method, Settings.of(batch_size=16, path="reference"))
    return Problem(engine, method, strategy, federation.n_classes)


def start(p: Problem) -> State:
    return State(0, p.model.vector.clone(), p.method.init_server(K, p.n_classes, p.model.n_params))


def play(strategy: RateStrategy, t: int) -> int:
    """A round without a federation: rewards and reports from a seeded generator."""
    rng = np.random.default_rng(t)
    probes = strategy.ask().shape[1]
    n = {None: 0, "binary": 2**strategy.n_axes, "uniform": probes}[strategy.patterns()]
    strategy.observe(np.arange(K), [torch.as_tensor(rng.standard_normal((probes, 20))) for _ in range(K)])
    reports = {name: rng.random((K, probes)) for name in strategy.reports}
    return strategy.tell(rng.random(n) if n else None, reports=reports)


@pytest.mark.parametrize("name", ALL)
def test_asking_twice_gives_the_same_probes_within_the_range(name: str) -> None:
    strategy = build(name)
    strategy.begin(Setting(20, 1.0, np.array([30, 10, 20, 40])))
    for t in range(20):
        probes = strategy.ask()
        np.testing.assert_array_equal(probes, strategy.ask())
        assert probes.ndim == 2 and len(probes) == K and ((probes >= 0) & (probes <= 1)).all()
        winner = play(strategy, t)
        assert winner >= 0 and (strategy.choice < probes.shape[1]).all() and strategy.choice.shape == (K,)
        assert strategy.rates.shape == (K,) and strategy.axes.max() < strategy.n_axes
        np.testing.assert_allclose(strategy.weights(np.full(K, 0.25), np.arange(K)).sum(), 1.0)
        json.dumps(strategy.stats(), allow_nan=False)


@pytest.mark.parametrize("name", ALL)
def test_rates_stay_once_the_search_is_done(name: str) -> None:
    strategy = build(name)
    strategy.begin(Setting(20, 1.0, np.array([30, 10, 20, 40])))
    for t in range(25):
        done, before = strategy.done, strategy.rates
        play(strategy, t)
        if done:
            np.testing.assert_array_equal(strategy.rates, before)
            assert strategy.done and strategy.ask().shape == (K, 1) and strategy.patterns() is None
    assert strategy.done or name == "fast"


@pytest.mark.parametrize("cut", [0, 1, 3, 7])
@pytest.mark.parametrize("name", ALL)
def test_saved_as_json_at_any_round_it_goes_on_identically(name: str, cut: int) -> None:
    one, two = build(name), build(name)
    setting = Setting(12, 1.0, np.array([30, 10, 20, 40]))
    one.begin(setting)
    for t in range(cut):
        play(one, t)
    two.load_state(json.loads(json.dumps(one.state(), allow_nan=False)))
    two.begin(setting)
    for t in range(cut, 12):
        np.testing.assert_array_equal(one.ask(), two.ask())
        assert play(one, t) == play(two, t)
        np.testing.assert_array_equal(one.rates, two.rates)
        assert one.done == two.done and one.stats() == two.stats()


@pytest.mark.parametrize("name", ALL)
def test_it_trains_a_federation_and_resumes_to_the_same_model(name: str) -> None:
    plan = Settings.of(rounds=ROUNDS, lr=0.05)
    whole = problem(build(name))
    end = train_rounds(whole, plan, start(whole))
    assert len(end.history) == ROUNDS and bool(torch.isfinite(end.x).all())

    first = problem(build(name))
    saved: dict[str, Any] = {}

    def keep(state: State, record: dict[str, Any], seconds: float) -> None:
        if state.round == 3:
            saved["rates"] = json.loads(json.dumps(first.rates.state()))
            saved["state"] = State(3, state.x.clone(), dict(state.method), history=list(state.history))

    train_rounds(first, plan, start(first), keep)
    second = problem(build(name))
    second.rates.load_state(saved["rates"])
    again = train_rounds(second, plan, saved["state"])
    assert torch.equal(again.x, end.x)
    assert json.dumps(again.history) == json.dumps(end.history)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("fedhoo", "hoo", "random_settle")])
def test_it_works_with_half_of_the_clients(name: str) -> None:
    p = problem(build(name))
    end = train_rounds(p, Settings.of(rounds=ROUNDS, lr=0.05, participation=0.5), start(p))
    assert all(len(r["clients"]) == 2 for r in end.history)


def test_names_and_options_are_those_of_the_config() -> None:
    assert {
        "uniform",
        "fixed",
        "fedhoo",
        "fedhoo_clusters",
        "random_settle",
        "hoo",
        "fast",
        "locally_optimal",
        "grid",
        "schedule",
    } <= set(ALL)
    for name in ALL:
        assert "n_clients" not in RATES.options(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RATES.build("fedhoo", 5, low=0.3, cold_rounds=0)
