import numpy as np
import pytest
import torch

import fedtail as ft
from fedtail.core.records import Task
from fedtail.errors import FedtailError
from fedtail.methods import FedCGNM
from fedtail.models import FlatModel
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.settings import Settings
from fedtail_experiments.diagnostics import assumption_monitor, full_group_gradient
from tests.conftest import blob_federation

WHOLE = 10_000
"""A batch size that makes every epoch one full-batch step."""


def test_full_batch_first_step_has_cosine_one_and_no_gap(federation, module) -> None:
    """The paper's assumption fails at step 1 with full-batch gradients: m = (1 - beta) grad f exactly."""
    model, settings = FlatModel(module), Settings.of(batch_size=WHOLE)
    task = Task(0, model.vector.clone(), (0, 1), {"rate": np.full((2, 1), 0.5)}, 0.1)
    found = assumption_monitor(federation, model, FedCGNM(beta=0.7), settings)(task, task.x)["assumption"]
    np.testing.assert_allclose(found["cosine"], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["gap"], 0.0, atol=1e-6)


def test_group_gradients_over_the_epoch_sum_to_the_resampled_objectives_gradient(federation, module) -> None:
    model, settings = FlatModel(module), Settings.of()
    task = Task(2, model.vector.clone(), (1,), {"rate": np.full((1, 1), 0.8)}, 0.1)
    full = full_group_gradient(model, federation, 1, FedCGNM(), 0.8, task, settings)
    from fedtail.rounds.plan import plan_local_run

    plan = plan_local_run(federation.client(1), 0.8, 2, Settings.of(batch_size=WHOLE), "shuffled")
    index = torch.as_tensor(plan.batches[0])
    loss = torch.nn.functional.cross_entropy(model.module(federation.pool.x[index]), federation.pool.y[index])
    torch.testing.assert_close(full.sum(0).float(), model.gradient(loss), atol=1e-5, rtol=1e-4)


def test_the_full_gradient_is_full_whatever_the_epoch_length(federation, module) -> None:
    model = FlatModel(module)
    task = Task(2, model.vector.clone(), (1,), {"rate": np.full((1, 1), 0.8)}, 0.1)
    found = [
        full_group_gradient(model, federation, 1, FedCGNM(), 0.8, task, Settings.of(epoch_length=length))
        for length in ("inflated", "original")
    ]
    torch.testing.assert_close(found[0], found[1], atol=0.0, rtol=0.0)


def test_monitors_measure_without_changing_the_run(tmp_path) -> None:
    small = ["data.name=blobs", "data.n_max=60", "data.clients=3", "run.rounds=3", f"run.folder='{tmp_path}'"]
    plain = run(load_config(None, [*small, "run.diagnostics=[]"]))
    every = run(load_config(None, [*small, "run.diagnostics=['alignment','losses','sgd_alignment','assumption']"]))
    assert torch.equal(plain.x, every.x)
    for record in every.history:
        assert record["validation_loss"] > 0
        assert -1 <= record["sgd_alignment"] <= 1 and -1 <= record["alignment"] <= 1
        assert len(record["assumption"]["cosine"]) == 2 and min(record["assumption"]["gap"]) >= 0


def test_the_shadow_of_fedavg_is_fedavg_itself(tmp_path) -> None:
    small = ["data.name=blobs", "data.n_max=60", "data.clients=3", "run.rounds=2", f"run.folder='{tmp_path}'"]
    found = run(load_config(None, [*small, "method.name=fedavg", "run.diagnostics=['alignment','sgd_alignment']"]))
    assert found.history[0]["sgd_alignment"] == pytest.approx(found.history[0]["alignment"], abs=1e-6)


def test_assumption_needs_momentum() -> None:
    with pytest.raises(FedtailError, match="momentum"):
        assumption_monitor(blob_federation(), FlatModel(torch.nn.Linear(10, 5)), ft.methods.FedAvg(), Settings.of())
