"""Whole runs on the batched path take the reference path's decisions, under every rate strategy."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rounds.engine import LocalSettings
from fedtail.rounds.loop import Problem, State, train_rounds
from fedtail.rounds.plan import Plan
from fedtail.rounds.server import ServerOptimizer
from fedtail.simulate import simulator
from tests.conftest import blob_federation
from tests.rates.test_conformance import OPTIONS

K, ROUNDS = 4, 4


def run(path: str, rates: str, participation: float = 1.0) -> State:
    federation = blob_federation(K)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(16, 8))
    method = METHODS.build("fedcgnm")
    engine = simulator(federation, module, method, LocalSettings(batch_size=16), path=path)
    strategy = RATES.build(rates, K, **OPTIONS.get(rates, {}))
    made = Problem(engine, engine.model, method, strategy, ServerOptimizer(), federation.n_classes)
    state = State(0, engine.model.vector.clone(), method.init_server(K, made.n_classes, engine.model.n_params))
    return train_rounds(made, Plan(rounds=ROUNDS, participation=participation, schedule="constant"), state)


@pytest.mark.parametrize("rates", sorted(RATES))
def test_every_rate_strategy_decides_as_on_the_reference_path(rates: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, got = run("reference", rates), run("batched", rates)
    torch.testing.assert_close(got.x, expected.x, rtol=1e-3, atol=1e-4)
    for a, b in zip(expected.history, got.history, strict=True):
        np.testing.assert_allclose(b["rates"], a["rates"])
        assert b["test"]["accuracy"] == pytest.approx(a["test"]["accuracy"], abs=0.011)


def test_two_runs_with_some_of_the_clients_give_the_same_bits() -> None:
    first, second = run("batched", "uniform", 0.5), run("batched", "uniform", 0.5)
    assert torch.equal(first.x, second.x)
    assert json.dumps(first.history) == json.dumps(second.history)
    torch.testing.assert_close(first.x, run("reference", "uniform", 0.5).x, rtol=1e-3, atol=1e-4)
