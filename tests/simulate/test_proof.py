"""A fast path that would train another model steps aside, whatever the user's module does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.methods import METHODS, FedAvg
from fedtail.methods.base import Batch
from fedtail.models import build_model
from fedtail.models.registry import with_classifier
from fedtail.settings import Settings
from fedtail.simulate import ReferenceSimulator, simulator
from fedtail.simulate.paths import few_samples
from tests.simulate.batched.test_simulator import make_federation, make_module, make_task

IMAGE, TABLE = (3, 20, 20), (12,)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def cnn() -> nn.Sequential:
    """Smooth: at a kink, rounding would turn a whole sample over."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def old_weight_norm() -> nn.Module:
    module = mlp()
    weight_norm(module[0])
    return module


def new_weight_norm() -> nn.Module:
    module = mlp()
    parametrizations.weight_norm(module[0])
    return module


def hooked(layer: int, module: nn.Sequential, hook: Callable[[Tensor], Tensor]) -> nn.Module:
    module[layer].register_forward_hook(lambda m, given, out: hook(out))
    return module


def old_weight_norm_on_images() -> nn.Module:
    module = cnn()
    weight_norm(module[0])
    return module


class Shell(nn.Module):
    """A module with a forward method of its own around plain layers."""

    def __init__(self, features: nn.Sequential) -> None:
        super().__init__()
        self.features, self.output = features[:-1], features[-1]


class Tapped(Shell):
    """Reads an activation by its layer's index."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i == 2:
                tapped = x
        out: Tensor = self.output(x + F.adaptive_avg_pool2d(tapped, 2).flatten(1))
        return out


class Whitened(Shell):
    """Takes statistics of its batch, without a layer that says so."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        out: Tensor = self.output((h - h.mean(0)) / (h.std(0, correction=0) + 1e-3) if self.training else h)
        return out


class Counting(Shell):
    """Depends on how many samples it is given."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.features(x)) * (1 + 1 / len(x))
        return out


class InPlace(Shell):
    """A residual that is added in place."""

    def __init__(self, features: nn.Sequential) -> None:
        super().__init__(features)
        self.inner, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x))
        h += x
        out: Tensor = self.output(self.features(h))
        return out


class Viewing(Shell):
    """Written for contiguous images: ``view`` of the input, and of what a convolution makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.view(len(x), -1).mean(1).view(-1, 1, 1, 1)
        h = self.features[:-1](x)
        out: Tensor = self.output(h.view(len(h), -1))
        return out


class WeaklyCentred(Shell):
    """Takes so little of its batch that no update on a few samples shows it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        out: Tensor = self.output(h + 3e-3 * h.mean(0) if self.training else h)
        return out


class Waiting(Shell):
    """Behaves otherwise from the tenth step on."""

    def __init__(self, features: nn.Sequential) -> None:
        super().__init__(features)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        out: Tensor = self.output(self.features(x)) * torch.where(self.steps > 9, 2.0, 1.0)
        return out


class Bounded(Shell):
    """Cuts weights that have become long, which they are not in the beginning."""

    def forward(self, x: Tensor) -> Tensor:
        self.output.weight.data = torch.renorm(self.output.weight.data, p=2, dim=0, maxnorm=1.0)
        out: Tensor = self.output(self.features(x))
        return out


MODULES = {
    "old weight norm": (TABLE, old_weight_norm),
    "new weight norm": (TABLE, new_weight_norm),
    "weight norm on a convolution": (IMAGE, old_weight_norm_on_images),
    "hook": (TABLE, lambda: hooked(1, mlp(), lambda out: out * 2)),
    "hook on a convolution": (IMAGE, lambda: hooked(4, cnn(), lambda out: out * 0.5)),
    "tapped by index": (IMAGE, lambda: Tapped(cnn())),
    "own batch statistics": (TABLE, lambda: Whitened(mlp())),
    "own batch statistics on images": (IMAGE, lambda: Whitened(cnn())),
    "batch size": (TABLE, lambda: Counting(mlp())),
    "batch size on images": (IMAGE, lambda: Counting(cnn())),
    "in-place residual": (IMAGE, lambda: InPlace(cnn())),
    "views": (IMAGE, lambda: Viewing(cnn())),
    "double": (TABLE, lambda: mlp().double()),
    "double images": (IMAGE, lambda: cnn().double()),
}


def made(kind: str) -> tuple[Federation, nn.Module]:
    torch.manual_seed(0)
    shape, make = MODULES[kind]
    return make_federation("images" if shape == IMAGE else "mlp"), make()


def assert_trains_the_users_model(kind: str, name: str, **engine: object) -> None:
    federation, module = made(kind)
    method, settings = METHODS.build(name), Settings.of(batch_size=engine.pop("batch_size", 8))
    fast = simulator(federation, module, method, Settings.of(batch_size=settings.local.batch_size, **engine))
    _, again = made(kind)
    reference = ReferenceSimulator(federation, again.float(), method, settings)
    task = make_task(method, reference, probes=1)
    for a, b in zip(reference.train(task)[0], fast.train(task)[0], strict=True):
        assert float((a.delta - b.delta).norm() / a.delta.norm()) < 1e-3
    a, b = reference.confusion(task.x, "test"), fast.confusion(task.x, "test")
    assert (a == b).all()


@pytest.mark.parametrize("method", ["fedavg", "fedcgnm"])
@pytest.mark.parametrize("kind", MODULES)
def test_a_run_trains_the_users_own_model_whatever_it_does(kind: str, method: str) -> None:
    assert_trains_the_users_model(kind, method)


TAKEN_ON_GPUS = ("tapped by index", "in-place residual", "views", "double images")


@pytest.mark.parametrize("method", ["fedavg", "fedcgnm"])
@pytest.mark.parametrize("kind", [k for k, (shape, _) in MODULES.items() if shape == IMAGE])
def test_the_graph_path_trains_the_users_own_model_or_says_why_not(kind: str, method: str) -> None:
    """On the CPU, where nothing is recorded; ``auto`` on a GPU takes the reference path where this is an error."""
    try:
        assert_trains_the_users_model(kind, method, batch_size=128, path="graph")
        assert kind in TAKEN_ON_GPUS
    except FedtailError as error:
        assert "set engine.path to 'auto'" in str(error) and kind not in TAKEN_ON_GPUS


@pytest.mark.parametrize("path", ["batched", "graph"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WeaklyCentred, "samples of a batch influence each other"),
        (Waiting, "a training pass counts in 'steps'"),
        (Bounded, "a training pass puts another tensor in the place of 'output.weight'"),
    ],
)
def test_what_shows_late_or_little_is_looked_for(kind: type[Shell], reason: str, path: str) -> None:
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    with pytest.raises(FedtailError, match=reason):
        simulator(make_federation("mlp"), kind(smooth), FedAvg(), Settings.of(path=path))
    engine = simulator(make_federation("mlp"), kind(smooth), FedAvg(), Settings.of())
    assert engine.info()["path"] == "reference" and reason in engine.info()["reason"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("old weight norm", "layer '0' has a hook"),
        ("new weight norm", "layer '0' has a parametrization"),
        ("hook", "layer '1' has a hook"),
        ("own batch statistics", "differ from the reference path's by"),
        ("batch size on images", "differ from the reference path's by"),
    ],
)
def test_one_line_says_why_the_reference_path_runs(kind: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = simulator(*made(kind), FedAvg(), Settings.of(batch_size=8))
    assert engine.info()["path"] == "reference" and reason in engine.info()["reason"]
    assert [reason in line for line in caplog.messages] == [True]


def test_a_fast_path_that_was_asked_for_and_may_not_run_is_one_clear_line() -> None:
    with pytest.raises(FedtailError, match=r"engine.path = 'batched' cannot handle this run: layer '1' has a hook"):
        simulator(*made("hook"), FedAvg(), Settings.of(path="batched"))


def test_a_model_that_begins_at_zero_hides_nothing() -> None:
    """Where the last layer is 0, nothing flows back to those before it."""
    federation, module = made("own batch statistics")
    nn.init.zeros_(module.output.weight)
    assert simulator(federation, module, FedAvg(), Settings.of(batch_size=8)).info()["path"] == "reference"


class AtAKink(Shell):
    """Answers for some samples turn on how sums are rounded, as at the kink of a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        kink = torch.sin(1e8 * h.detach().sum(1, keepdim=True))
        out: Tensor = self.output(h) * torch.where(x[:, :1] > 50, 1 + 0.2 * kink, 1.0)
        return out


@pytest.mark.parametrize(("marked", "path"), [("the first", "batched"), ("all", "reference")])
def test_samples_that_rounding_turns_over_judge_no_path(marked: str, path: str) -> None:
    """A ReLU at its kink sent whole runs on a GPU to the reference path."""
    torch.manual_seed(0)
    federation, module = make_federation("mlp"), AtAKink(mlp())
    assert simulator(federation, module, FedAvg(), Settings.of(batch_size=8)).info()["path"] == "batched"
    x = federation.pool.x.clone()
    asked = few_samples(federation).pool.x
    at = slice(None) if marked == "all" else (x[:, None] == asked).all(2).any(1)
    x[at, 0] = 100.0
    turned = replace(federation, pool=replace(federation.pool, x=x))
    assert simulator(turned, module, FedAvg(), Settings.of(batch_size=8)).info()["path"] == path


def test_every_turn_has_samples_of_its_own() -> None:
    federation = make_federation("mlp")
    first, second = (few_samples(federation, turn).pool.x for turn in (0, 1))
    assert not (first[:, None] == second).all(2).any()


class Leaking(FedAvg):
    """The user's own loss, which padding leaks into."""

    own_loss = True

    def loss(self, logits: Tensor, batch: Batch, const: dict, state: dict) -> tuple[Tensor, dict]:
        losses, state = super().loss(logits, batch, const, state)
        return losses / losses.detach().mean(-1, keepdim=True), state


def test_a_loss_that_padding_leaks_into_runs_on_the_reference_path() -> None:
    engine = simulator(make_federation("mlp"), make_module("mlp"), Leaking(), Settings.of(batch_size=8))
    assert engine.info()["path"] == "reference"


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("kind", ["mlp", "residual", "images"])
def test_the_projects_own_methods_prove_themselves(kind: str, name: str) -> None:
    method = METHODS.build(name)
    module = with_classifier(make_module(kind), method.traits.classifier)
    assert simulator(make_federation(kind), module, method, Settings.of()).info()["path"] == "batched"


def test_dropout_on_the_graph_path_is_compared_at_its_average() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*cnn()[:-1], nn.Dropout(0.5), nn.Linear(32, 4))
    engine = simulator(make_federation("images"), module, FedAvg(), Settings.of(path="graph"))
    assert engine.info()["path"] == "graph"
    module = build_model("small_cnn", IMAGE, 4, channels=(4, 6), norm_groups=2)
    assert simulator(make_federation("images"), module, FedAvg(), Settings.of(path="graph")).info()["fused"]


def test_a_federation_of_three_samples_is_enough() -> None:
    federation = make_federation("mlp")
    rows = federation.train[0][:3]
    few = replace(federation, train=(rows[:2], rows[2:]), validation=(rows[:0], rows[:0]), sites=("a", "b"))
    assert simulator(few, make_module("mlp"), FedAvg(), Settings.of()).info()["path"] == "batched"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_batchnorm_proves_itself_on_the_graph_path_with_every_method(name: str) -> None:
    method = METHODS.build(name)
    layers = list(cnn())
    layers[1], layers[5] = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    module = with_classifier(nn.Sequential(*layers), method.traits.classifier)
    assert simulator(make_federation("images"), module, method, Settings.of(path="graph")).info()["path"] == "graph"
