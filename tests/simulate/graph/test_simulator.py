"""The graph path does what the reference path does, for every method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedtail.core.candidates import binary_candidates
from fedtail.core.records import Task
from fedtail.data.federation import Federation, Transform
from fedtail.methods import METHODS
from fedtail.methods.base import Method, Server
from fedtail.models import build_model
from fedtail.models.registry import with_classifier
from fedtail.settings import Settings
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.reference import ReferenceSimulator
from fedtail_experiments.methods.measurements import CLASS_LOSS, CLASS_MOMENTS, TRAIN_LOSS

TOLERANCE = 2e-5
"""Largest difference of any parameter's update after one round, in units of the largest update (at least 0.01)."""


def small_cnn(norm: str = "group") -> nn.Module:
    torch.manual_seed(0)
    layer = nn.GroupNorm(2, 4) if norm == "group" else nn.BatchNorm2d(4)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), layer, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )


def images(augment: str | None = "crop-flip") -> Federation:
    rng = np.random.default_rng(0)
    clients = []
    for n in (37, 22, 9):
        y = np.concatenate([np.arange(4), rng.choice(4, size=n - 4, p=[0.6, 0.25, 0.1, 0.05])])
        x = rng.integers(0, 256, size=(n, 3, 8, 8)).astype(np.uint8)
        clients.append((x, y))
    test = (rng.integers(0, 256, size=(15, 3, 8, 8)).astype(np.uint8), rng.integers(0, 4, size=15))
    return Federation.from_arrays(
        clients, test, classes=list("abcd"), validation=0.2, augment=augment,
        transform=Transform(1 / 255, (0.5, 0.4, 0.3), (0.2, 0.3, 0.2)),
    )  # fmt: skip


def round_task(method: Method, x: torch.Tensor, engine: ReferenceSimulator, probes: int = 2) -> tuple[Task, dict]:
    """A round as the loop would give it, with the method's server messages."""
    server_state = method.init_server(engine.n_clients, engine.federation.n_classes, engine.model.n_params)
    p = engine.sizes / engine.sizes.sum()

    def output_weight(vector: torch.Tensor) -> torch.Tensor:
        offset, shape = engine.model.output_layer()
        return vector[offset : offset + shape[0] * shape[1]].view(shape)

    _, (rows, columns) = engine.model.output_layer()
    server = Server(
        0, 10, x, engine.n_clients, 4, p, lambda what, other=None: engine.measure(x if other is None else other, what),
        lambda: torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(1)), output_weight,
        engine.model.classifier, lambda models: np.zeros(len(models)),
    )  # fmt: skip
    server_state = method.before_round(server, server_state)
    clients = tuple(range(engine.n_clients))
    rates = np.linspace(0.2, 0.9, len(clients) * probes).reshape(len(clients), probes)
    task = Task(
        0, x, clients, {"rate": rates}, 0.1, method.broadcast(server_state),
        {k: m for k in clients if (m := method.message(server_state, k))},
        reports=frozenset({"local_gain", "local_validation"}),
    )  # fmt: skip
    return task, server_state


def both(method: Method, settings: Settings, norm: str = "group", augment: str | None = "crop-flip", **options):
    federation = images(augment)
    one, two = (with_classifier(small_cnn(norm), method.traits.classifier) for _ in range(2))
    reference = ReferenceSimulator(federation, one, method, settings)
    fast = GraphSimulator(federation, two, method, settings, **options)
    return reference, fast


def assert_same_round(reference, fast, task) -> None:
    expected, refused = reference.train(task)
    got, refused_too = fast.train(task)
    assert not refused and not refused_too
    for a, b in zip(expected, got, strict=True):
        scale = max(float(a.delta.abs().max()), 0.01)
        assert float((a.delta - b.delta).abs().max()) <= TOLERANCE * scale
        assert a.steps == b.steps and a.client == b.client and a.n_samples == b.n_samples
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-5)
        assert a.reports.keys() == b.reports.keys()
        for name in a.reports:
            np.testing.assert_allclose(a.reports[name], b.reports[name], atol=1e-4)
        assert a.extras.keys() == b.extras.keys()
        for name in a.extras:
            torch.testing.assert_close(a.extras[name], b.extras[name], rtol=1e-3, atol=TOLERANCE * max(scale, 1))
    choice = {u.client: len(u.steps) - 1 for u in expected}
    reference.commit(choice)
    fast.commit(choice)
    for k, state in reference.state().items():
        for name, value in state.items():
            torch.testing.assert_close(value, fast.state()[k][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_rounds_equal_the_reference_for_every_method(name: str) -> None:
    method = METHODS.build(name)
    reference, fast = both(method, Settings.of(epochs=1, batch_size=8, seed=3))
    x = reference.model.vector.clone()
    task, _ = round_task(method, x, reference)
    assert_same_round(reference, fast, task)
    assert_same_round(reference, fast, task)  # with the client state of the first


@pytest.mark.parametrize("n_groups", [1, 2, 3, None])
def test_every_number_of_groups_equals_the_reference(n_groups: int | None) -> None:
    method = METHODS.build("fedcgnm", n_groups=n_groups, weight_decay=1e-3)
    reference, fast = both(method, Settings.of(epochs=2, batch_size=8), lanes=2)
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)


def test_batchnorm_is_never_padded_and_its_statistics_equal_the_reference() -> None:
    method = METHODS.build("fedcgnm")
    reference, fast = both(method, Settings.of(epochs=1, batch_size=8), norm="batch")
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)


def test_runs_share_lanes_without_touching_each_other() -> None:
    method = METHODS.build("fedcgnm")
    federation, settings = images(), Settings.of(batch_size=8)
    deltas = []
    for lanes in (1, 6):
        engine = GraphSimulator(federation, small_cnn(), method, settings, lanes=lanes)
        reference = ReferenceSimulator(federation, small_cnn(), method, settings)
        task, _ = round_task(method, engine.model.vector.clone(), reference)
        deltas.append(torch.stack([u.delta for u in engine.train(task)[0]]))
    assert torch.equal(*deltas)


class Forgetful(nn.Module):
    """Dropout as a layer and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.output = small_cnn()[:-1], nn.Linear(16, 4)
        self.layer = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.below(x), 0.3, self.training)
        out: torch.Tensor = self.output(self.layer(h))
        return out


def assert_masks_follow_from_round_client_and_step(engine: Callable[..., GraphSimulator]) -> None:
    """engine: builds one with so many lanes. A resumed run records anew, and may give clients to other lanes."""
    plain, many, resumed = engine(lanes=1), engine(lanes=6), engine(lanes=6)
    x, probes = plain.model.vector.clone().cpu(), {"rate": np.array([[0.2, 0.9], [0.3, 0.8], [0.5, 0.5]])}

    def deltas(engine: GraphSimulator, round: int, rows: list[int]) -> dict[int, torch.Tensor]:
        given = {k: v[rows] for k, v in probes.items()}
        return {u.client: u.delta.cpu() for u in engine.train(Task(round, x, tuple(rows), given, 0.1))[0]}

    before, after = deltas(plain, 0, [0, 1, 2]), deltas(plain, 1, [0, 1, 2])
    assert not torch.equal(before[0], after[0])
    deltas(many, 0, [0, 1, 2])
    for other in (deltas(many, 1, [0, 1, 2]), deltas(resumed, 1, [0, 1, 2]), deltas(resumed, 1, [2, 0])):
        assert all(torch.equal(delta, after[k]) for k, delta in other.items())
    assert torch.equal(after[2][0], after[2][1])  # equal rates draw equal masks


@pytest.mark.parametrize(("fused", "n_groups"), [(True, 1), (True, 2), (False, 1), (False, 2), (False, 3)], ids=str)
def test_dropout_masks_follow_from_seed_round_client_and_step(fused: bool, n_groups: int) -> None:
    torch.manual_seed(0)
    module, method = Forgetful(), METHODS.build("fedcgnm", n_groups=n_groups)

    def engine(lanes: int) -> GraphSimulator:
        return GraphSimulator(
            images(), copy.deepcopy(module), method, Settings.of(batch_size=8), fused=fused, lanes=lanes
        )

    assert_masks_follow_from_round_client_and_step(engine)


def test_validation_confusion_and_measurements_equal_the_reference() -> None:
    method = METHODS.build("fedavg")
    reference, fast = both(method, Settings.of(batch_size=8))
    x = reference.model.vector.clone()
    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(3, 2, x.numel(), generator=generator) * 0.3
    candidates = binary_candidates(x, np.array([0.5, 0.3, 0.2]), deltas, np.arange(3), 3)
    assert np.array_equal(reference.validate(candidates, [0, 1, 2]), fast.validate(candidates, [0, 1, 2]))
    assert np.array_equal(reference.validate(candidates, [0, 2]), fast.validate(candidates, [0, 2]))
    for split in ("test", "validation"):
        assert np.array_equal(reference.confusion(x, split), fast.confusion(x, split))
    for what in (TRAIN_LOSS, CLASS_LOSS, CLASS_MOMENTS):
        a, b = reference.measure(x, what), fast.measure(x, what)
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_loss_that_is_not_finite_refuses_the_client_and_names_the_step() -> None:
    method = METHODS.build("fedavg")
    reference, fast = both(method, Settings.of(batch_size=8))
    task, _ = round_task(method, reference.model.vector.clone(), reference, probes=1)
    bad = Task(0, task.x * float("nan"), task.clients, task.probes, 0.1)
    updates, refusals = fast.train(bad)
    assert not updates
    assert refusals[0].reason.startswith("loss became nan at step 1 of ")


def test_a_longer_run_than_the_buffers_hold_makes_new_ones() -> None:
    method = METHODS.build("fedcgnm")
    reference, fast = both(method, Settings.of(batch_size=8))
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)
    longer = Task(1, task.x, task.clients, {"rate": np.full((3, 2), 2.0)}, 0.1)
    assert_same_round(reference, fast, longer)


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "pcn", "fedgrab", "fednoro"])
def test_networks_that_cannot_be_fused_equal_the_reference(name: str) -> None:
    method = METHODS.build(name)
    reference, fast = both(method, Settings.of(batch_size=8), fused=False)
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)


def sequences() -> Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 16)).astype(np.float32), np.arange(n) % 3) for n in (20, 13)]
    return Federation.from_arrays(data, data[1], classes=list("abc"), validation=0.2)


def test_recurrent_models_equal_the_reference() -> None:
    federation = sequences()
    method, settings = METHODS.build("fedcgnm"), Settings.of(batch_size=8)
    module = [build_model("cnn_lstm", (16,), 3, channels=(4, 8), hidden=5) for _ in range(2)]
    reference = ReferenceSimulator(federation, module[0], method, settings)
    fast = GraphSimulator(federation, module[1], method, settings)
    assert not fast.numerics.fused
    task = Task(0, reference.model.vector.clone(), (0, 1), {"rate": np.full((2, 1), 0.5)}, 0.1)
    assert_same_round(reference, fast, task)


def test_a_client_without_validation_samples_reports_none_as_on_the_reference_path() -> None:
    method = METHODS.build("fedavg")
    reference, fast = both(method, Settings.of(batch_size=8))
    for engine in (reference, fast):
        f = engine.federation
        engine.federation = replace(f, validation=(f.validation[0][:0], *f.validation[1:]))
    task, _ = round_task(method, reference.model.vector.clone(), reference)
    assert_same_round(reference, fast, task)
    assert np.isnan(fast.train(task)[0][0].reports["local_validation"]).all()
