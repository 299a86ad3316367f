from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.methods import METHODS
from fedtail.settings import Settings
from fedtail.simulate.batched.compiling import cache_folder, pays
from fedtail.simulate.batched.simulator import BatchedSimulator
from tests.simulate.batched.test_simulator import assert_same_round, both, make_federation, make_module, make_task


def test_a_method_with_its_own_loss_is_compiled_only_in_a_long_run() -> None:
    focal = METHODS.build("focal")
    assert not pays(None, focal, 100, 100, 1e7)
    assert pays(None, focal, 100_000, 100, 1e7)


def test_plain_cross_entropy_is_compiled_only_when_asked() -> None:
    fedavg = METHODS.build("fedavg")
    assert not pays(None, fedavg, 10**9, 100, 1e7)
    assert pays(True, fedavg, 1, 1, 1.0) and not pays(False, METHODS.build("focal"), 10**9, 100, 1e7)


def test_a_resumed_run_compiles_where_the_uninterrupted_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps round differently, and a resumed run first sees another round: other clients, rates, probes."""
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    method = METHODS.build("focal")
    for rounds in (10_000, 100_000, 300_000, 1_000_000):
        modes = set()
        for clients, probes in (((0, 1, 2, 3, 4), 2), ((4,), 1)):
            settings = Settings.of(batch_size=8, rounds=rounds)
            engine = BatchedSimulator(make_federation("mlp"), make_module("mlp"), method, settings)
            engine.train(make_task(method, engine, clients=clients, probes=probes))
            modes.add(engine.info()["steps"] == "compiled")
        assert len(modes) == 1, rounds


def test_compiled_steps_are_cached_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fedtail" / "inductor"


def test_where_compiling_fails_the_step_is_captured_and_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: object, **options: object) -> object:
        def call(*tensors: torch.Tensor) -> None:
            tensors[0].add_(1.0)  # a half-done step must not leave traces
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    method, settings = METHODS.build("focal"), Settings.of(batch_size=16, compile="on")
    reference, _ = both("mlp", method, settings)
    engine = BatchedSimulator(make_federation("mlp"), make_module("mlp"), method, settings)
    assert_same_round(reference, engine, make_task(method, reference, probes=1))
    assert engine.info()["steps"] == "replay"
    assert engine.info()["notes"] == ["not compiled: RuntimeError: no compiler here"]


@pytest.mark.slow
def test_compiled_steps_equal_the_reference() -> None:
    method, settings = METHODS.build("focal"), Settings.of(batch_size=16, compile="on")
    reference, _ = both("mlp", method, settings)
    engine = BatchedSimulator(make_federation("mlp"), make_module("mlp"), method, settings)
    same_length = {"rate": np.full((1, 2), 0.4), "lr": np.array([[0.1, 0.2]])}
    task = make_task(method, reference, clients=(0,), **same_length)
    assert_same_round(reference, engine, task)
    if any("not compiled" in note for note in engine.info().get("notes", [])):
        pytest.skip(f"no working compiler here: {engine.info()['notes']}")
    assert engine.info()["steps"] == "compiled"
