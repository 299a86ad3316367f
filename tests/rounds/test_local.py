import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedtail import fit
from fedtail.core.records import DIVERGED, Task
from fedtail.data.federation import Client, Federation, Samples, Transform
from fedtail.errors import FedtailError
from fedtail.methods import Batch, FedAvg, FedCGN, FedCGNM, Method
from fedtail.models import FlatModel, build_model
from fedtail.rounds.local import DivergedError, group_gradients, load_batch, train_client, train_probe
from fedtail.rounds.plan import plan_local_run
from fedtail.settings import Settings
from fedtail_experiments.methods.pcn import PCN


def task_for(x: torch.Tensor, client: int = 0, rate: float = 0.6, lr: float = 0.1, probes: int = 1) -> Task:
    return Task(0, x, (client,), {"rate": np.full((1, probes), rate)}, lr)


def conv_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


def test_gradients_of_split_batches_equal_masked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FlatModel(conv_model())
    x, y = torch.randn(32, 1, 8, 8), torch.randint(0, 5, (32,))
    groups = torch.tensor([0, 0, 1, 2, 1])
    batch = Batch(y, torch.ones(32))
    split, loss_a, _ = group_gradients(model, FedAvg(), x, batch, groups, 3, {}, {})
    monkeypatch.setattr(model, "couples", lambda shape: True)
    masked, loss_b, _ = group_gradients(model, FedAvg(), x, batch, groups, 3, {}, {})
    torch.testing.assert_close(split, masked, atol=1e-6, rtol=1e-5)
    assert loss_a == pytest.approx(loss_b, abs=1e-6)


def test_group_gradients_sum_to_the_ordinary_batch_gradient() -> None:
    model = FlatModel(conv_model())
    x, y = torch.randn(20, 1, 8, 8), torch.randint(0, 5, (20,))
    grads, _, _ = group_gradients(
        model, FedAvg(), x, Batch(y, torch.ones(20)), torch.tensor([0, 1, 1, 0, 1]), 2, {}, {}
    )
    ordinary = model.gradient(nn.functional.cross_entropy(model.module(x), y))
    torch.testing.assert_close(grads.sum(0), ordinary, atol=1e-6, rtol=1e-5)


def test_batchnorm_models_take_one_forward_pass_for_all_groups() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model = FlatModel(module)
    assert model.size == model.n_params + 12  # running mean and variance ride along
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    grads, _, _ = group_gradients(model, FedAvg(), x, Batch(y, torch.ones(16)), torch.tensor([0, 1, 1]), 2, {}, {})
    ordinary = model.gradient(nn.functional.cross_entropy(model.module(x), y))
    torch.testing.assert_close(grads.sum(0), ordinary, atol=1e-6, rtol=1e-5)


class Centred(nn.Module):
    """Statistics of the batch, in no layer that is called BatchNorm."""

    def __init__(self, draws: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(draws), nn.Linear(6, 3)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.drop(self.first(x))
        return self.last(z - z.mean(0) if self.training else z)


class Sized(Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) / len(x)


@pytest.mark.parametrize("module", [Centred(), Centred(0.5), Sized()])
def test_batches_of_samples_that_influence_each_other_are_not_split_by_group(module: nn.Module) -> None:
    torch.manual_seed(0)
    model = FlatModel(module)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    groups, batch = torch.tensor([0, 1, 1]), Batch(y, torch.ones(16))
    torch.manual_seed(1)
    grads, _, _ = group_gradients(model, FedAvg(), x, batch, groups, 2, {}, {})
    torch.manual_seed(1)
    ordinary = model.gradient(nn.functional.cross_entropy(model.module(x), y))
    torch.testing.assert_close(grads.sum(0), ordinary, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "resnet8", "cnn_lstm"])
def test_samples_of_our_models_stand_alone(name: str) -> None:
    shape = {"mlp": (12,), "cnn_lstm": (16,)}.get(name, (1, 8, 8))
    options = {"cnn_lstm": {"channels": (4,), "hidden": 5}, "resnet8": {"width": 32}}.get(name, {})
    model = FlatModel(build_model(name, shape, 3, **options))
    before = model.vector.clone()
    assert not model.couples(shape) and torch.equal(model.vector, before)
    kept = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    assert not kept.couples((12,))


class Replacing(nn.Module):
    """Puts new tensors in the place of a weight (a bound on norms, as EEGNet's), of a mean and of a count."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 5)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.weight.data = torch.renorm(self.last.weight.data, p=2, dim=0, maxnorm=0.3)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.seen = self.seen + 1
        return self.last(x - self.mean) / (1 + self.seen)


def test_what_a_pass_puts_in_the_place_of_weights_and_buffers_is_trained_sent_and_reset() -> None:
    """Such weights stood still, such buffers went from client to client, and other workers gave other models."""
    draws = torch.Generator().manual_seed(0)
    pool = Samples(torch.randn(40, 12, generator=draws), torch.randint(0, 5, (40,), generator=draws))
    client = Client(0, pool, np.arange(40), np.arange(0), 5, Transform(), None)
    module, settings = Replacing(), Settings.of(batch_size=8)
    plain = copy.deepcopy(module)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    for index in plan_local_run(client, 0.6, 0, settings).batches:
        sgd.zero_grad()
        nn.functional.cross_entropy(plain(pool.x[index]), pool.y[index]).backward()
        sgd.step()
    model = FlatModel(module)
    x0 = model.vector.clone()
    for _ in range(2):  # as for a second client
        delta, *_ = train_probe(model, client, FedAvg(), task_for(x0, lr=0.5), 0, 0, {}, settings)
        expected = torch.cat([p.detach().flatten() for p in (*plain.parameters(), plain.mean)])
        torch.testing.assert_close(x0 + delta, expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(model.module.seen, plain.seen) and model.module.seen > 1
    model.load(x0)
    assert torch.equal(torch.cat([p.detach().flatten() for p in (*module.parameters(), module.mean)]), x0)
    assert not module.seen


def test_buffers_that_a_batch_changes_are_changed_once_in_a_step() -> None:
    """By all of its samples: a group of few would have counted as much as the others."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    model = FlatModel(nn.Sequential(nn.Unflatten(1, (2, 6)), norm, nn.Flatten(), nn.Linear(12, 3)))
    x, y = torch.randn(16, 12), torch.arange(16) % 3
    group_gradients(model, FedAvg(), x, Batch(y, torch.ones(16)), torch.tensor([0, 1, 1]), 2, {}, {})
    torch.testing.assert_close(norm.running_mean, 0.1 * x.view(16, 2, 6).mean((0, 2)))


@pytest.mark.parametrize("method", [FedCGNM(), FedCGN(), FedCGNM(n_groups=3, beta=0.9), PCN()])
@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_round_displacement_is_bounded_by_lr_steps_groups(federation, module, method: Method, lr: float) -> None:
    model = FlatModel(module)
    x0 = model.vector.clone()
    delta, loss, *_ = train_probe(
        model, federation.client(0), method, task_for(x0, lr=lr), 0, 0, {}, Settings.of(batch_size=8, epochs=2)
    )
    bound = method.bound(lr, len(loss), federation.n_classes)
    assert bound == lr * len(loss) * method.group_count(federation.n_classes)
    assert 0 < delta.norm() < bound


def test_one_group_without_momentum_and_delta_is_normalized_sgd(federation, module) -> None:
    model = FlatModel(module)
    x0 = model.vector.clone()
    client, settings = federation.client(1), Settings.of(batch_size=16)
    delta, *_ = train_probe(
        model, client, FedCGNM(n_groups=1, beta=0.0, delta=0.0), task_for(x0, 1), 0, 0, {}, settings
    )
    plain = FlatModel(module)
    plain.load(x0)
    for index in plan_local_run(client, 0.6, 0, settings).batches:
        loss = nn.functional.cross_entropy(plain.module(client.pool.x[index]), client.pool.y[index])
        g = plain.gradient(loss)
        with torch.no_grad():
            plain.vector.sub_(0.1 * g / g.norm())
    torch.testing.assert_close(delta, plain.vector - x0, atol=1e-6, rtol=1e-5)


def test_pcn_is_cgn_with_a_group_per_class(federation, module) -> None:
    model = FlatModel(module)
    x0 = model.vector.clone()
    runs = [
        train_probe(model, federation.client(0), m, task_for(x0), 0, 0, {}, Settings.of())[0]
        for m in (PCN(), FedCGN(n_groups=5, delta=1e-6))
    ]
    # Groups are labelled by frequency, so the sums run in another order.
    torch.testing.assert_close(runs[0], runs[1], atol=1e-6, rtol=1e-5)


def test_weight_decay_comes_after_normalization(federation, module) -> None:
    model = FlatModel(module)
    x0 = model.vector.clone()
    settings = Settings.of(batch_size=10_000)  # one step
    plain, *_ = train_probe(model, federation.client(0), FedCGNM(), task_for(x0), 0, 0, {}, settings)
    decayed, *_ = train_probe(model, federation.client(0), FedCGNM(weight_decay=1e-2), task_for(x0), 0, 0, {}, settings)
    torch.testing.assert_close(decayed, plain - 0.1 * 1e-2 * x0, atol=1e-6, rtol=1e-4)


def test_both_probes_of_a_round_start_from_the_same_model_and_equal_rates_agree(federation, module) -> None:
    model = FlatModel(module)
    update, _ = train_client(
        model, federation.client(2), FedCGNM(), task_for(model.vector.clone(), 2, probes=2), 0, {}, Settings.of()
    )
    assert update.delta.shape[0] == 2 and torch.equal(update.delta[0], update.delta[1])


def test_a_run_that_diverged_counts_as_one_that_did_not_move_where_that_is_asked_for(federation, module) -> None:
    model = FlatModel(module)
    tried = {"rate": np.zeros((1, 2)), "lr": np.array([[0.1, 1e30]])}
    task = Task(0, model.vector.clone(), (0,), tried, 0.1, reports=frozenset({DIVERGED}))
    settings = Settings.of(batch_size=8)
    update, _ = train_client(model, federation.client(0), FedAvg(), task, 0, {}, settings)
    assert update.reports[DIVERGED].tolist() == [0.0, 1.0]
    assert update.delta[0].abs().max() > 0 and not update.delta[1].any()
    assert update.steps[0] > 0 and update.steps[1] == 0 and np.isfinite(update.loss).all()
    with pytest.raises(DivergedError, match="loss became"):
        train_client(model, federation.client(0), FedAvg(), replace(task, reports=frozenset()), 0, {}, settings)


def test_dropout_draws_are_keyed_by_client_and_round(federation) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 5))
    model = FlatModel(module)
    x0 = model.vector.clone()
    torch.manual_seed(1)
    a, *_ = train_probe(model, federation.client(0), FedAvg(), task_for(x0), 0, 0, {}, Settings.of())
    torch.manual_seed(2)
    b, *_ = train_probe(model, federation.client(0), FedAvg(), task_for(x0), 0, 0, {}, Settings.of())
    assert torch.equal(a, b)


def test_augmentation_is_drawn_per_copy_and_repeats_with_the_key() -> None:
    from tests.conftest import blob_federation

    assert blob_federation().client(0).augment is None
    from dataclasses import replace

    from fedtail.data import DATASETS, partition

    pool = DATASETS.build("digits")
    fed = partition(pool.train, pool.test, clients=2, transform=pool.transform, augment="crop-flip")
    plan = plan_local_run(fed.client(0), 0.8, 3, Settings.of(batch_size=16))
    again = plan_local_run(fed.client(0), 0.8, 3, Settings.of(batch_size=16))
    other = plan_local_run(fed.client(0), 0.8, 4, Settings.of(batch_size=16))
    assert plan.draws is not None and again.draws is not None and other.draws is not None
    assert all(np.array_equal(p, q) for p, q in zip(plan.draws, again.draws, strict=True))
    assert not np.array_equal(plan.draws[0], other.draws[0])
    model = FlatModel(build_model("mlp", fed.input_shape, 10))
    delta, *_ = train_probe(model, fed.client(0), FedCGNM(), task_for(model.vector.clone()), 0, 0, {}, Settings.of())
    assert torch.isfinite(delta).all()
    assert replace(fed, augment=None).client(0).augment is None


def test_a_shifted_image_has_a_border_of_the_mean_colour() -> None:
    images = Samples(torch.full((2, 3, 8, 8), 200, dtype=torch.uint8), torch.tensor([0, 1]))
    transform = Transform(scale=1 / 255, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
    client = Client(0, images, np.arange(2), np.arange(0), 2, transform, "crop-flip")
    x, _ = load_batch(client, np.arange(2), np.array([[1, 4, 0], [4, 4, 0]]), torch.device("cpu"))
    assert torch.equal(x[0, :, :3], torch.zeros(3, 3, 8)) and (x[0, :, 3:] > 0).all()
    assert torch.equal(x[1], transform(images.x[1:])[0])


@pytest.mark.parametrize("path", ["reference", "graph"])
def test_batchnorm_on_a_batch_of_one_sample_is_one_clear_line(path: str) -> None:
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    one = Federation.from_arrays([(x, np.arange(9) % 2)], (x, np.arange(9) % 2), validation=0.0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(FedtailError, match="batch of one sample"):
        fit(one, module, rates=0.0, rounds=1, batch_size=8, path=path)
