"""The batched path does what the reference path does, for every method."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedtail.core.candidates import binary_candidates
from fedtail.core.records import Task, Tensors
from fedtail.data.federation import Federation, Transform
from fedtail.errors import FedtailError
from fedtail.methods import METHODS, FedAvg
from fedtail.methods.base import LocalRun, Method, Server
from fedtail.models import build_model
from fedtail.models.registry import with_classifier
from fedtail.settings import Settings
from fedtail.simulate import simulator
from fedtail.simulate.batched import cohort, programs
from fedtail.simulate.batched.capture import CaptureError
from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.reference import ReferenceSimulator
from fedtail_experiments.methods.measurements import CLASS_LOSS, CLASS_MOMENTS, TRAIN_LOSS

TOLERANCE = 5e-5
"""Largest difference of any parameter's update after one round, in units of the largest update."""

SIZES = (61, 40, 22, 9, 5)
CLASSES = 4


class Residual(nn.Module):
    """No sequence of known layers, so it goes through torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        return self.last(h + torch.tanh(self.second(h)))


def make_module(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return build_model("mlp", (12,), CLASSES, hidden=(16, 8), norm_groups=2)
    if kind == "wide":  # has a weight of over ``layers.LARGE`` entries, whose gradients are added up in place
        return build_model("mlp", (12,), CLASSES, hidden=(160, 128))
    if kind == "residual_mlp":
        return build_model("residual_mlp", (12,), CLASSES, width=8, norm_groups=2)
    if kind == "cnn":
        return build_model("small_cnn", (2, 6, 6), CLASSES, channels=(4, 6), norm_groups=2)
    if kind == "images":
        return build_model("small_cnn", (3, 20, 20), CLASSES, channels=(8, 12), norm_groups=2)
    return Residual()


def make_federation(kind: str) -> Federation:
    """Ragged clients: sizes from 5 to 61, the smallest without some classes."""
    rng = np.random.default_rng(0)
    shape = {"cnn": (2, 6, 6), "images": (3, 20, 20)}.get(kind, (12,))
    transform = (
        Transform(1 / 255, (0.5, 0.4, 0.4)[: shape[0]], (0.2, 0.3, 0.3)[: shape[0]]) if shape[1:] else Transform()
    )

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(CLASSES, size=n, p=[0.6, 0.25, 0.1, 0.05])
        if shape[1:]:
            return rng.integers(0, 256, size=(n, *shape)).astype(np.uint8), y
        return (rng.standard_normal((n, *shape)) + y[:, None] / 2).astype(np.float32), y

    return Federation.from_arrays(
        [draw(n) for n in SIZES], draw(30), classes=list("abcd"), validation=0.2, transform=transform,
        augment="crop-flip" if shape[1:] else None,
    )  # fmt: skip


def with_large_site(kind: str) -> Federation:
    """One client has 4,096 samples, so that a batch of so many is one."""
    federation = make_federation(kind)
    return replace(federation, train=(np.resize(federation.train[0], 4096), *federation.train[1:]))


def both(
    kind: str, method: Method, settings: Settings, capture_after: float = math.inf
) -> tuple[ReferenceSimulator, BatchedSimulator]:
    federation = make_federation(kind)
    one, two = (with_classifier(make_module(kind), method.traits.classifier) for _ in range(2))
    return (
        ReferenceSimulator(federation, one, method, settings),
        BatchedSimulator(federation, two, method, settings, capture_after=capture_after),
    )


def make_task(
    method: Method,
    engine: ReferenceSimulator,
    *,
    probes: int = 2,
    clients: tuple[int, ...] | None = None,
    **more: object,
) -> Task:
    """A round as the loop would give it, with the method's server messages."""
    x = engine.model.vector.clone()
    state = method.init_server(engine.n_clients, CLASSES, engine.model.n_params)
    offset, (rows, columns) = engine.model.output_layer()
    server = Server(
        0, 10, x, engine.n_clients, CLASSES, engine.sizes / engine.sizes.sum(),
        lambda what, other=None: engine.measure(x if other is None else other, what),
        lambda: torch.randn(CLASSES, rows, columns, generator=torch.Generator().manual_seed(1)),
        lambda v: v[offset : offset + rows * columns].view(rows, columns), engine.model.classifier,
        lambda models: np.zeros(len(models)),
    )  # fmt: skip
    state = method.before_round(server, state)
    sampled = tuple(range(engine.n_clients)) if clients is None else clients
    rates = np.linspace(0.2, 0.9, len(sampled) * probes).reshape(len(sampled), probes)
    return Task(
        0, x, sampled, {"rate": rates, **more}, 0.1, method.broadcast(state),
        {k: m for k in sampled if (m := method.message(state, k))},
        reports=frozenset({"local_gain", "local_validation"}),
    )  # fmt: skip


def assert_same_round(reference: ReferenceSimulator, fast: BatchedSimulator, task: Task) -> None:
    expected, refused = reference.train(task)
    got, refused_too = fast.train(task)
    assert not refused and not refused_too
    for a, b in zip(expected, got, strict=True):
        scale = float(a.delta.abs().max())
        assert float((a.delta - b.delta).abs().max()) <= TOLERANCE * scale + 1e-7
        assert (a.steps, a.client, a.n_samples) == (b.steps, b.client, b.n_samples)
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-5)
        assert a.reports.keys() == b.reports.keys()
        for name in a.reports:
            np.testing.assert_allclose(a.reports[name], b.reports[name], atol=1e-4)
        assert a.extras.keys() == b.extras.keys()
        for name in a.extras:
            torch.testing.assert_close(a.extras[name], b.extras[name], rtol=1e-3, atol=TOLERANCE * max(scale, 1))
    choice = {u.client: task.n_probes - 1 for u in expected}
    reference.commit(choice)
    fast.commit(choice)
    assert reference.state().keys() == fast.state().keys()
    for k, state in reference.state().items():
        for name, value in state.items():
            torch.testing.assert_close(value, fast.state()[k][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "residual_mlp", "cnn", "images", "residual"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_rounds_equal_the_reference_for_every_method(name: str, kind: str) -> None:
    method = METHODS.build(name)
    reference, fast = both(kind, method, Settings.of(batch_size=8, seed=5))  # no activation within rounding of a kink
    task = make_task(method, reference)
    assert_same_round(reference, fast, task)
    assert_same_round(reference, fast, task)  # with the client state of the first
    assert "fallbacks" not in fast.info()


@pytest.mark.parametrize("kind", ["mlp", "residual_mlp", "residual"])
@pytest.mark.parametrize("n_groups", [1, 2, 3, None])
def test_every_number_of_groups_equals_the_reference(n_groups: int | None, kind: str) -> None:
    method = METHODS.build("fedcgnm", n_groups=n_groups, weight_decay=1e-3)
    reference, fast = both(kind, method, Settings.of(epochs=2, batch_size=16))
    assert_same_round(reference, fast, make_task(method, reference))


@pytest.mark.parametrize("capture_after", [math.inf, 0.0])
@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "fedcgn", "fedprox"])
def test_gradients_that_are_added_up_in_place_equal_the_reference(name: str, capture_after: float) -> None:
    method = METHODS.build(name, weight_decay=1e-2)
    reference, fast = both("wide", method, Settings.of(batch_size=16, epochs=2), capture_after)
    task = make_task(method, reference)
    assert_same_round(reference, fast, task)
    decay = np.linspace(0.0, 0.1, 10).reshape(5, 2)
    assert_same_round(reference, fast, make_task(method, reference, weight_decay=decay))
    assert fast.info()["steps"] == ("eager" if capture_after else "replay") and "notes" not in fast.info()


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "focal", "scaffold"])
def test_uniform_rounds_with_some_of_the_clients_equal_the_reference(name: str) -> None:
    method = METHODS.build(name)
    reference, fast = both("mlp", method, Settings.of(batch_size=8, seed=1))
    for clients in ((0, 2, 4), (3,), (1, 2)):
        assert_same_round(reference, fast, make_task(method, reference, probes=1, clients=clients))


def test_searched_quantities_are_taken_per_client_and_probe() -> None:
    method = METHODS.build("fedcgnm")
    reference, fast = both("mlp", method, Settings.of(batch_size=16))
    beta, lr = np.linspace(0.1, 0.9, 10).reshape(5, 2), np.linspace(0.02, 0.2, 10).reshape(5, 2)
    assert_same_round(reference, fast, make_task(method, reference, beta=beta))
    assert_same_round(reference, fast, make_task(method, reference, lr=lr))
    decay = np.linspace(0.0, 0.1, 10).reshape(5, 2)
    assert_same_round(reference, fast, make_task(method, reference, weight_decay=decay))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fedavg", "mlp"),
        ("fedcgnm", "mlp"),
        ("fedgrab", "mlp"),
        ("fednoro", "mlp"),
        ("fedcgnm", "residual_mlp"),
        ("fedcgnm", "residual"),
    ],
)
def test_captured_steps_give_the_bits_of_called_ones(name: str, kind: str) -> None:
    method = METHODS.build(name)
    settings = Settings.of(batch_size=16, epochs=2)
    federation = make_federation(kind)
    results = []
    for capture_after in (math.inf, 0.0):
        engine = BatchedSimulator(federation, make_module(kind), method, settings, capture_after=capture_after)
        task = make_task(method, engine, clients=(0, 1))
        updates, _ = engine.train(task)
        engine.commit({u.client: 0 for u in updates})
        updates, _ = engine.train(task)
        results.append(torch.cat([u.delta for u in updates]))
        assert engine.info()["steps"] == ("eager" if capture_after else "replay")
        assert "notes" not in engine.info()
    assert torch.equal(*results)


def test_a_step_is_captured_once_it_was_called_often_and_will_be() -> None:
    method, settings = METHODS.build("fedavg"), Settings.of(batch_size=8, rounds=9)

    def captured(rounds: range, capture_after: float) -> tuple[list[bool], int]:
        """Whether a step ran from a capture in these rounds, and the most calls of one."""
        federation, module = make_federation("mlp"), make_module("mlp")
        engine = BatchedSimulator(federation, module, method, settings, capture_after=capture_after)
        said = []
        for t in rounds:
            engine.train(replace(make_task(method, engine, clients=(0,)), round=t))
            said.append("replay" in str(engine.info()["steps"]))
        return said, max(p.calls for p in engine.programs._programs.values())

    _, calls = captured(range(1), math.inf)
    assert captured(range(4), 3 * calls)[0] == [False, False, True, True]
    assert captured(range(5, 9), 3 * calls)[0] == [False] * 4, "two rounds before the end it does not pay"


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "scaffold", "focal"])
def test_a_captured_step_without_any_one_of_its_calls_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round momenta are 0 and, with a warm-up, the learning rate may be: nothing is compared on these."""
    method, captured, blind, tried = METHODS.build(name), [], [], 0
    real_capture, real_check = programs.capture, programs.check

    def capture(*given: Any) -> Any:
        captured.append((given, [t.clone() for t in given[1]]))
        return real_capture(*given)

    def check(step: Any, tape: Any, values: Any) -> None:
        nonlocal tried
        real_check(step, tape, values)
        given, contents = captured[-1]
        for i in range(len(tape.calls)):
            programs.restore(tape.inputs, contents)
            again = real_capture(*given)
            tried += 1
            try:
                real_check(step, replace(again, calls=[c for j, c in enumerate(again.calls) if j != i]), values)
                if tape.calls[i].func not in (torch.gt, torch.ge):  # of what is always above 0
                    blind.append((i, tape.calls[i]))
            except CaptureError:
                pass

    monkeypatch.setattr(programs, "capture", capture)
    monkeypatch.setattr(programs, "check", check)
    engine = BatchedSimulator(
        make_federation("mlp"), make_module("mlp"), method, Settings.of(batch_size=16), capture_after=0
    )
    engine.train(replace(make_task(method, engine, clients=(0, 1)), lr=0.0))
    assert tried > 50 and not blind and engine.info()["steps"] == "replay"


def test_a_cohort_larger_than_one_step_holds_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "MAX_ROWS", 3)
    method = METHODS.build("fedcgnm")
    reference, fast = both("mlp", method, Settings.of(batch_size=8))
    assert_same_round(reference, fast, make_task(method, reference))


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm", "scaffold", "fedgrab"])
def test_short_batches_have_short_steps_that_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch's last batch, where a run is alone: 61 samples are a step of 32 and one of 24 or 32."""
    monkeypatch.setattr(cohort, "MAX_ROWS", 1)
    monkeypatch.setattr(cohort, "SHORT_PAYS", 0.0)
    method, found = METHODS.build(name), []
    for capture_after in (math.inf, 0.0):
        reference, fast = both("wide", method, Settings.of(batch_size=32, epochs=2), capture_after)
        task = make_task(method, reference)
        assert_same_round(reference, fast, task)
        found.append(torch.cat([u.delta for u in fast.train(task)[0]]))
        kept = fast.programs._runners[0]
        columns = {signature.columns for signature, _ in kept}
        assert len(columns) > 1 and len({id(r.inputs["x"]) for r in kept.values()}) == 1
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["mlp", "residual_mlp", "cnn", "residual"])
def test_validation_confusion_and_measurements_equal_the_reference(kind: str) -> None:
    method = METHODS.build("fedavg")
    reference, fast = both(kind, method, Settings.of(batch_size=8))
    x = reference.model.vector.clone()
    deltas = torch.randn(5, 2, x.numel(), generator=torch.Generator().manual_seed(0)) * 0.3
    candidates = binary_candidates(x, np.array([0.4, 0.3, 0.2, 0.05, 0.05]), deltas, np.arange(5), 5)
    for clients in ([0, 1, 2, 3, 4], [0, 2]):
        assert np.array_equal(reference.validate(candidates, clients), fast.validate(candidates, clients))
    for split in ("test", "validation"):
        assert np.array_equal(reference.confusion(x, split), fast.confusion(x, split))
    for what in (TRAIN_LOSS, CLASS_LOSS, CLASS_MOMENTS):
        a, b = reference.measure(x, what), fast.measure(x, what)
        assert a.keys() == b.keys()
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_loss_that_is_not_finite_refuses_that_client_only_and_names_the_step() -> None:
    method = METHODS.build("fedavg")
    reference, fast = both("mlp", method, Settings.of(batch_size=8))
    task = make_task(method, reference, probes=1, clients=(0, 2))
    bad = Task(0, task.x, (0, 2), {**task.probes, "lr": np.array([[1e30], [0.1]])}, 0.1)
    expected, refused = reference.train(bad)
    got, refused_too = fast.train(bad)
    assert [r.client for r in refused_too] == [r.client for r in refused] == [0]
    assert refused_too[0].reason.split(" at ")[1] == refused[0].reason.split(" at ")[1]
    assert [u.client for u in got] == [u.client for u in expected] == [2]


class Gated(nn.Module):
    """Parts of a split that go into one concatenation, and that into another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(12, 16), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.inner(x).sigmoid().split(8, -1)
        h = torch.cat([torch.cat([a * b, b], -1), a], -1)
        out: torch.Tensor = self.output(h[:, :8] * h[:, 8:16] + h[:, 16:])
        return out


@pytest.mark.parametrize("name", ["fedavg", "fedcgnm"])
def test_a_step_with_split_activations_is_captured_with_the_bits_of_the_step(name: str) -> None:
    method = METHODS.build(name)
    torch.manual_seed(0)
    module, federation, settings = Gated(), make_federation("mlp"), Settings.of(batch_size=8)
    called, captured = (
        BatchedSimulator(federation, copy.deepcopy(module), method, settings, capture_after=n) for n in (math.inf, 0)
    )
    task = make_task(method, called)
    plain, fast = ([u.delta for u in engine.train(task)[0]] for engine in (called, captured))
    assert all(map(torch.equal, plain, fast))
    info = captured.info()
    assert info["steps"] == "replay" and "notes" not in info


def test_client_constants_of_different_shapes_fall_back_to_the_reference() -> None:
    class Uneven(FedAvg):
        def start(self, run: LocalRun, client_state: Tensors) -> tuple[Tensors, Tensors]:
            return {"own": torch.zeros(run.client + 1)}, {}

    reference, fast = both("mlp", Uneven(), Settings.of(batch_size=8))
    assert_same_round(reference, fast, make_task(Uneven(), reference, probes=1))
    assert sum(fast.info()["fallbacks"].values()) == 1


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)), "BatchNorm"),
        (nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)), "dropout"),
        (nn.Sequential(nn.Linear(12, 20000), nn.ReLU(), nn.Linear(20000, 4)), "enough to fill a core"),
    ],
)
def test_auto_leaves_to_the_reference_what_batching_does_not_take_and_says_why(module: nn.Module, reason: str) -> None:
    engine = simulator(with_large_site("mlp"), module, METHODS.build("fedavg"), Settings.of(batch_size=4096))
    assert engine.info()["path"] == "reference"
    assert reason in engine.info()["reason"]


def test_convolutions_run_side_by_side_only_where_that_is_faster() -> None:
    """One model at a time is ahead from about 5e6 operations a batch on (measured)."""
    for batch, path in ((8, "batched"), (4096, "reference")):
        engine = simulator(with_large_site("cnn"), make_module("cnn"), FedAvg(), Settings.of(batch_size=batch))
        assert engine.info()["path"] == path, engine.info()


def test_auto_takes_small_models_and_says_why() -> None:
    for kind, kernel in (("mlp", "Network"), ("residual_mlp", "Network"), ("residual", "FunctionalKernel")):
        engine = simulator(make_federation(kind), make_module(kind), METHODS.build("fedcgnm"), Settings.of())
        assert engine.info()["path"] == "batched"
        assert "small model" in engine.info()["reason"] and engine.info()["kernel"] == kernel


def test_asking_for_the_batched_path_where_it_does_not_work_is_one_clear_line() -> None:
    module = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))
    with pytest.raises(FedtailError, match=r"engine.path = 'batched' cannot handle this run: BatchNorm .*'auto'"):
        simulator(make_federation("mlp"), module, METHODS.build("fedavg"), Settings.of(path="batched"))


def test_threads_are_restored_after_training() -> None:
    method = METHODS.build("fedavg")
    engine = BatchedSimulator(make_federation("mlp"), make_module("mlp"), method, Settings.of(batch_size=8))
    torch.set_num_threads(2)
    try:
        engine.train(make_task(method, engine))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_client_without_validation_samples_reports_none_as_on_the_reference_path() -> None:
    """An accuracy of 0 at every probe would be a tie, and the lowest rate would win it."""
    reference, fast = both("mlp", FedAvg(), Settings.of(batch_size=8))
    for engine in (reference, fast):
        f = engine.federation
        engine.federation = replace(f, validation=(f.validation[0][:0], *f.validation[1:]))
    task = make_task(FedAvg(), reference)
    assert_same_round(reference, fast, task)
    assert np.isnan(fast.train(task)[0][0].reports["local_validation"]).all()
