"""CReFF against numbers from an independent reading of its paper; its fast way against the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtail.errors import FedtailError
from fedtail.methods import FedAvg
from fedtail.rates import RATES
from fedtail.rounds.race import racing
from fedtail.rounds.validation import kept_model
from fedtail.settings import Settings
from fedtail_experiments.methods.creff import (
    CReFF,
    descend,
    descend_in_span,
    first_features,
    match_gradients,
    mean_gradients,
    mismatch,
    mismatch_gradient,
    told_length,
    told_means,
)
from fedtail_experiments.methods.measurements import class_gradients
from fedtail_experiments.methods.retraining import fit_linear
from tests.methods.federations import awkward_federation, problem, train


@pytest.mark.parametrize(("n_classes", "per_class", "d"), [(4, 6, 60), (2, 5, 40), (3, 8, 9)])
@pytest.mark.parametrize("zero", [False, True])
def test_creff_moves_features_within_their_span_as_it_does_outside(
    n_classes: int, per_class: int, d: int, zero: bool
) -> None:
    """The last has more rows than dimensions. Heads on frozen features start at zero."""
    rng = torch.Generator().manual_seed(11)
    means = 2 + torch.randn(n_classes, d, generator=rng).double()
    y = torch.arange(60) % n_classes
    x = means[y] + torch.randn(60, d, generator=rng)
    weight, bias = (0.0 if zero else 0.3) * torch.randn(n_classes, d, generator=rng).double(), torch.arange(n_classes)
    goal = class_gradients(x, x @ weight.T + bias, y, n_classes)
    f = means.unsqueeze(1) + torch.randn(n_classes, per_class, d, generator=rng)
    length = f.square().sum(-1).mean().sqrt()
    problem = torch.arange(n_classes), goal, weight, bias.double(), 50, length**2 * 0.01, length
    plain, fast = descend(f, *problem), descend_in_span(f, *problem)
    assert float((plain - f).abs().max()) > 0.01
    assert torch.allclose(fast, plain, rtol=0, atol=1e-9)
    short = [t.float() if t.is_floating_point() else t for t in problem[:4]]
    low, low_fast = (go(f.float(), *short, 50, *(v.float() for v in problem[-2:])) for go in (descend, descend_in_span))
    assert torch.allclose(low_fast, low, rtol=0, atol=1e-3)
    assert torch.equal(descend_in_span(f, *problem[:4], 0, *problem[-2:]), f)


def test_creff_leaves_classes_that_nobody_has_alone_in_either_way() -> None:
    rng = torch.Generator().manual_seed(12)
    features, goal = torch.randn(3, 4, 30, generator=rng), torch.randn(3, 3, 31, generator=rng)
    layer = 0.1 * torch.randn(3, 30, generator=rng), torch.zeros(3)
    features[0], goal[2] = float("nan"), float("nan")  # never seen; seen before, and not asked for now
    known = torch.tensor([1])
    length = torch.tensor(5.0)
    moved = match_gradients(features, goal, *layer, 20, 0.1, length)
    assert moved[0].isnan().all() and torch.equal(moved[2], features[2])
    steps = 20, 0.1 * length**2 / 4, length / 4
    assert torch.allclose(moved[known], descend(features[known], known, goal[known], *layer, *steps), atol=1e-5)


def test_no_step_of_creff_s_features_is_longer_than_its_share_of_their_length() -> None:
    """A layer that is sure of its answers has a gradient of hardly any length, and a direction that is mostly noise."""
    rng = torch.Generator().manual_seed(14)
    features, goal = 5 + torch.randn(3, 4, 30, generator=rng), torch.randn(3, 3, 31, generator=rng)
    sure = 20 * torch.randn(3, 30, generator=rng), torch.zeros(3)
    moved = match_gradients(features, goal, *sure, 10, 100.0, torch.tensor(5.0))
    far = (moved - features).norm(dim=-1)
    assert float(far.max()) <= 10 * 5.0 / 4 + 1e-3
    assert float(far.max()) > 5.0 / 4


def test_creff_says_what_to_change_when_its_features_grow_out_of_bounds() -> None:
    features = 1e38 * torch.randn(2, 20, 30, generator=torch.Generator().manual_seed(13))
    state = {"features": features, "weight": torch.zeros(2, 30), "bias": torch.zeros(2)}
    with pytest.raises(FedtailError, match="features have grown out of bounds"):
        CReFF(features=20, decay=0.0).after_round(None, [], [], state)  # type: ignore[arg-type]


def test_class_gradients_are_what_autograd_says() -> None:
    torch.manual_seed(5)
    layer, f, y = nn.Linear(6, 4).double(), torch.randn(20, 6).double(), torch.randint(0, 3, (20,))
    found = class_gradients(f, layer(f), y, 4)
    assert found[3].isnan().all()
    for c in range(3):
        w, b = torch.autograd.grad(F.cross_entropy(layer(f[y == c]), y[y == c]), [layer.weight, layer.bias])
        assert torch.allclose(found[c, :, :-1], w) and torch.allclose(found[c, :, -1], b)
    other = torch.where(torch.arange(4).view(4, 1, 1) == 0, float("nan"), found * 3)
    mean = mean_gradients([found, other])
    assert torch.allclose(mean[0], found[0]) and torch.allclose(mean[1], 2 * found[1]) and mean[3].isnan().all()


def test_a_class_tells_the_mean_of_its_features_by_its_gradient() -> None:
    torch.manual_seed(6)
    layer, f, y = nn.Linear(6, 4).double(), torch.randn(60, 6).double() + 3, torch.randint(0, 3, (60,))
    with torch.no_grad():
        found = told_means(class_gradients(f, layer(f), y, 4))
        plain = told_means(class_gradients(f, 0 * layer(f), y, 4))
    x, w, b = f.numpy(), layer.weight.detach().numpy(), layer.bias.detach().numpy()
    p = np.exp(x @ w.T + b)
    p /= p.sum(1, keepdims=True)
    for c in range(3):
        mine = y.numpy() == c
        assert np.allclose(found[c], np.average(x[mine], axis=0, weights=1 - p[mine, c]))
        assert np.allclose(plain[c], x[mine].mean(0))  # a layer of zeros knows no class
    assert found[3].isnan().all()


def test_federated_features_start_around_the_told_means() -> None:
    goal = torch.full((3, 3, 3), float("nan")).double()
    goal[0, 0], goal[2, 2] = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-6.0, 0.0, -1.0])
    goal[0, 1:], goal[2, :2] = 0.25, 0.5
    noise = torch.randn(3, 4, 2)
    features = first_features(torch.full((3, 4, 2), float("nan")), goal, noise, 2.0)
    # means (2, 4) and (6, 0): each coordinate is 2 from its mean, so the noise has 2 * 2
    assert torch.allclose(features[0], torch.tensor([2.0, 4.0]) + 4 * noise[0])
    assert torch.allclose(features[2], torch.tensor([6.0, 0.0]) + 4 * noise[2])
    assert features[1].isnan().all()  # nobody has the class
    again = first_features(features, 2 * goal + 1, noise, 2.0)
    assert torch.equal(again[[0, 2]], features[[0, 2]])  # drawn once


def test_federated_features_learn_to_pull_as_real_ones_do() -> None:
    torch.manual_seed(6)
    layer, f, y = nn.Linear(6, 3).double(), torch.randn(60, 6).double(), torch.randint(0, 2, (60,))
    with torch.no_grad():
        goal = class_gradients(f, layer(f), y, 3)
        w, b = layer.weight.clone(), layer.bias.clone()
        start, known = torch.randn(3, 10, 6).double(), torch.tensor([0, 1])
        moved = match_gradients(start, goal, w, b, 200, 0.1, start.square().sum(-1).mean().sqrt())
        first, last = (float(mismatch(v[:2], known, goal[:2], w, b)) for v in (start, moved))
    assert last < 0.1 * first
    assert torch.equal(moved[2], start[2])  # nobody has the class, so nothing is known of it


def test_a_step_on_federated_features_is_the_authors_loss_by_autograd_in_units_of_their_length() -> None:
    torch.manual_seed(7)
    goal, w, b = torch.randn(2, 3, 6).double(), torch.randn(3, 5).double(), torch.randn(3).double()
    f, classes = torch.randn(2, 4, 5).double().requires_grad_(), torch.tensor([0, 2])
    total = torch.zeros(()).double()
    for c, target, mine in zip(classes, goal, f, strict=True):  # as CReFF-FL's match_loss writes it
        weight, bias = w.clone().requires_grad_(), b.clone().requires_grad_()
        loss = F.cross_entropy(mine @ weight.T + bias, c.repeat(4))
        for own, real in zip(
            torch.autograd.grad(loss, [weight, bias], create_graph=True),
            (target[:, :-1], target[:, -1:].T),
            strict=True,
        ):
            own = own.reshape(real.shape)
            total = total + (1 - (own * real).sum(-1) / (own.norm(dim=-1) * real.norm(dim=-1))).sum()
    (expected,) = torch.autograd.grad(total, [f])
    f = f.detach()
    assert float(mismatch(f, classes, goal, w, b)) == pytest.approx(float(total.detach()))
    assert torch.allclose(mismatch_gradient(f, classes, goal, w, b), expected)
    whole, target = torch.full((3, 4, 5), float("nan")).double(), torch.full((3, 3, 6), float("nan")).double()
    whole[classes], target[classes] = f, goal
    moved = match_gradients(whole, target, w, b, 1, 0.3, (f**2).sum(-1).mean().sqrt())[classes]
    assert torch.allclose(moved, f - 0.3 * float((f**2).sum(-1).mean()) / 4 * expected)  # 3 rows and the bias


def test_creff_tells_classes_apart_whose_features_have_much_in_common() -> None:
    """Features of most encoders: far from 0, close to each other. From N(0, 1) cosines say little of the difference."""
    rng = torch.Generator().manual_seed(8)
    means = 3 + 0.3 * torch.randn(3, 40, generator=rng)
    y = torch.arange(300) % 3
    x = means[y] + 0.3 * torch.randn(300, 40, generator=rng)
    weight, bias = torch.zeros(3, 40), torch.zeros(3)
    noise, features = torch.randn(3, 20, 40, generator=rng), torch.full((3, 20, 40), float("nan"))

    def right(features: Tensor) -> float:
        w, b = weight, bias
        for _ in range(3):
            goal = class_gradients(x, x @ w.T + b, y, 3)
            started, length = first_features(features, goal, noise, 2.0), told_length(goal, 2.0)
            features = match_gradients(started, goal.float(), w, b, 50, 0.03, length)
            labels = torch.arange(3).repeat_interleave(20)
            w, b = fit_linear(weight, bias, features.reshape(-1, 40), labels, steps=100, lr=0.1)
        return float(((x @ w.T + b).argmax(1) == y).float().mean())

    assert right(features) > 0.95 > right(noise)


def test_creff_does_not_learn_its_features_noise_by_heart() -> None:
    """Forty features in 300 dimensions: without decay every one is told by its own noise."""
    rng = torch.Generator().manual_seed(9)
    means = 0.1 * torch.randn(2, 1, 300, generator=rng)
    features, more = (means + torch.randn(2, n, 300, generator=rng) for n in (20, 500))
    labels, state = torch.arange(2), {"features": features, "weight": torch.zeros(2, 300), "bias": torch.zeros(2)}

    def loss(decay: float) -> float:
        fitted = CReFF(features=20, decay=decay).after_round(None, [], [], state)  # type: ignore[arg-type]
        z = more.reshape(-1, 300) @ fitted["weight"].T + fitted["bias"]
        return float(F.cross_entropy(z, labels.repeat_interleave(500)))

    assert loss(CReFF().decay) < 0.6 < 1.0 < loss(0.0)  # a coin has .69


def test_creff_is_judged_with_the_retrained_layer_and_trains_the_averaged_one() -> None:
    made, plain = problem(CReFF(features=20, match_steps=20, steps=100)), problem(FedAvg())
    state = train(made, 4)
    assert torch.equal(state.x, train(plain, 4).x)
    kept = kept_model(made, Settings.of(), state)
    assert torch.equal(made.model.classifier(kept)[0], state.method["weight"])
    judged = made.metrics(made.engine.confusion(kept, "test"))
    assert state.history[-1]["test"]["per_class_accuracy"] == judged["per_class_accuracy"]


def test_learning_rates_race_with_the_model_that_creff_would_keep() -> None:
    rates = racing(RATES.build("uniform", 5, rate=0.5), Settings.of(lr="auto"))
    made = problem(CReFF(features=4, match_steps=5, steps=20), awkward_federation(validation=0.3), rates=rates)
    state = train(made, 6, lr="auto", metric="macro_f1", validate_every=1)
    raced = [record for record in state.history if "race" in record]
    assert raced
    for record in raced:
        (first,) = {r["reward"] for r in record["race"] if r["lr"] == record["lr"]}
        assert first == record["validation"]["macro_f1"]
