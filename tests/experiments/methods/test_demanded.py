"""LDAM-DRW, FedReLa, FedWCM and FedNPC against numbers from an independent reading of their papers and code."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtail.core.records import Update
from fedtail.methods.base import Batch, LocalRun, LocalStep, Server
from fedtail.rounds.validation import kept_model
from fedtail.settings import Settings
from fedtail_experiments.methods.fednpc import FedNPC, on_noise
from fedtail_experiments.methods.fedrela import FedReLa, expected_labels, rarity
from fedtail_experiments.methods.fedwcm import FedWCM, client_scores, momentum_share
from fedtail_experiments.methods.ldam_drw import LDAMDRW
from tests.methods.federations import awkward_federation, problem, train

COUNTS = np.array([625, 16, 1, 0])


def local_run(message: dict[str, Tensor], counts: np.ndarray = COUNTS, **given: Any) -> LocalRun:
    about = {"client": 0, "round": 0, "n_params": 3, "steps": 4, "lr": 0.1, **given}
    return LocalRun(counts=counts, resampled=counts, message=message, **about)


def batch(y: list[int], teacher: Tensor | None = None) -> Batch:
    return Batch(torch.tensor(y), torch.ones(len(y)), teacher)


def server(round: int, rounds: int = 10) -> Server:
    def unused(*_: Any) -> Any:
        raise AssertionError

    return Server(
        round=round,
        rounds=rounds,
        x=torch.zeros(3),
        n_clients=3,
        n_classes=3,
        weights=np.array([0.5, 0.25, 0.25]),
        measure=unused,
        auxiliary_gradients=unused,
        output_weight=unused,
        classifier=unused,
        compare=unused,
    )


# -- LDAM-DRW


def test_ldam_s_margins_go_with_the_fourth_root_of_the_counts() -> None:
    method = LDAMDRW(margin=0.5, scale=3.0)
    const, _ = method.start(local_run({"weighted": torch.tensor(0.0)}), {})
    assert const["margin"].tolist() == pytest.approx([0.1, 0.25, 0.5, 0.5])  # 625^-1/4 = .2, 16^-1/4 = .5; nobody's: 0
    z = [0.3, -1.0, 0.5, 2.0]
    (loss,), _ = method.loss(torch.tensor([z]), batch([1]), const, {})
    moved = [3 * (v - (0.25 if c == 1 else 0)) for c, v in enumerate(z)]
    assert float(loss) == pytest.approx(math.log(sum(map(math.exp, moved))) - moved[1], rel=1e-6)


def test_ldam_weighs_by_effective_numbers_once_four_fifths_of_the_rounds_are_over() -> None:
    method = LDAMDRW(b=0.99)
    told = [float(method.broadcast(method.before_round(server(t), {}))["weighted"]) for t in range(10)]
    assert told == [0.0] * 8 + [1.0] * 2
    const, _ = method.start(local_run({"weighted": torch.tensor(1.0)}), {})
    raw = [0.01 / (1 - 0.99**n) for n in (625, 16, 1)]
    assert const["class_weight"][:3].tolist() == pytest.approx([3 * w / sum(raw) for w in raw], rel=1e-5)
    z, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), [0, 0, 1, 2, 0]
    losses, _ = method.loss(z, batch(y), const, {})
    moved = z.clone()
    for i, c in enumerate(y):
        moved[i, c] -= float(const["margin"][c])
    expected = nn.functional.cross_entropy(moved, torch.tensor(y), weight=const["class_weight"])  # as the authors' does
    assert float(losses.mean()) == pytest.approx(float(expected), rel=1e-5)


# -- FedReLa


def test_fedrela_s_rarity_is_linear_in_the_counts() -> None:
    assert rarity(np.array([10, 6, 0])) == pytest.approx([0, 0.4, 1])
    assert rarity(np.array([4, 4])) == pytest.approx([1, 1])


def test_fedrela_s_labels_are_the_mean_of_the_authors_draw() -> None:
    rates = [0.5, 0.0, 0.25, 0.8]
    own = torch.eye(4)[1]
    chances = [0.0] * 4
    for drawn in itertools.product([False, True], repeat=4):  # every outcome of their four independent draws
        chance = math.prod(r if d else 1 - r for r, d in zip(rates, drawn, strict=True))
        candidates = [c for c in range(4) if drawn[c]]
        chances[max(candidates, key=lambda c: rates[c]) if candidates else 1] += chance
    got = expected_labels(torch.tensor([rates]), own.unsqueeze(0))[0]
    assert got.tolist() == pytest.approx(chances)
    assert float(got.sum()) == pytest.approx(1.0)


def test_fedrela_relabels_what_stands_out_towards_rarer_classes_only() -> None:
    counts, method = np.array([6, 2, 4]), FedReLa(top=0.1)
    rng = torch.Generator().manual_seed(3)
    logits, y = 2 * torch.randn(12, 3, generator=rng), [0] * 6 + [1] * 2 + [2] * 4
    const, state = method.start(local_run({"relabel": torch.tensor(0.0)}, counts), {})
    plain, state = method.loss(logits, batch(y, logits), const, state)
    assert torch.allclose(plain, nn.functional.cross_entropy(logits, torch.tensor(y), reduction="none"))
    kept, extras = method.finish(local_run({}, counts), torch.zeros(3), const, state, {})
    assert not extras

    const, state = method.start(local_run({"relabel": torch.tensor(1.0)}, counts), kept)
    got, _ = method.loss(logits, batch(y, logits), const, state)
    q = torch.softmax(logits, 1).double().numpy()
    log_p, prior, bar = torch.log_softmax(logits, 1).numpy(), [0.0, 1.0, 0.5], NormalDist().inv_cdf(0.9)
    for i, c in enumerate(y):
        same = q[[j for j in range(12) if y[j] == c]]
        z = (q[i] - same.mean(0)) / same.std(0)
        rate = [max(math.tanh(z[k] - bar), 0) * max(prior[k] - prior[c], 0) for k in range(3)]
        order, stay, loss = sorted(range(3), key=lambda k: -rate[k]), 1.0, 0.0
        for k in order:
            loss -= stay * rate[k] * log_p[i, k]
            stay *= 1 - rate[k]
        assert float(got[i]) == pytest.approx(loss - stay * log_p[i, c], rel=1e-4)
    assert float(got[:6].sub(plain[:6]).abs().max()) > 0.01  # frequent samples are relabelled
    assert torch.allclose(got[6:8], plain[6:8])  # those of the rarest class never


# -- FedWCM


def update(client: int, counts: list[int], delta: list[float], pace: float) -> Update:
    return Update(
        client=client,
        delta=torch.tensor([delta]),
        n_samples=sum(counts),
        steps=(1,),
        loss=(0.0,),
        extras={"counts": torch.tensor([counts], dtype=torch.float32), "pace": torch.tensor([[pace]])},
    )


UPDATES = [update(0, [8, 2, 0], [1.0, 0.0, 2.0], 5.0), update(1, [2, 1, 2], [0.0, -2.0, 1.0], 2.5)]


def test_fedwcm_weighs_clients_by_what_they_hold_of_scarce_classes() -> None:
    # mix (10, 3, 2) / 15: scarce by (0, 2/15, 3/15); scores .2 * 2/15 = .4/15 and .2 * 2/15 + .4 * 3/15 = 1.6/15
    counts = np.array([[8, 2, 0], [2, 1, 2], [0, 0, 0]], dtype=float)
    assert client_scores(counts) == pytest.approx([0.4 / 15, 1.6 / 15, 0])
    method, p = FedWCM(temperature=2.0), np.array([2 / 3, 1 / 3])
    got = method.weights(p, UPDATES, method.init_server(3, 3, 3))
    raised = [2 / 3 * math.exp(0.4 / (2 * 1.0)), 1 / 3 * math.exp(1.6 / (2 * 1.0))]  # the mean score is 1/15
    assert got == pytest.approx([r / sum(raised) for r in raised])


def test_fedwcm_follows_the_weighted_direction_less_the_longer_the_tail() -> None:
    method = FedWCM(alpha=0.2, temperature=1e9)
    state = method.after_round(server(0), UPDATES, [0, 0], method.init_server(3, 3, 3))
    p = [2 / 3, 1 / 3]  # so high a temperature leaves these
    assert state["momentum"].tolist() == pytest.approx([-p[0] * 5, p[1] * 5, -p[0] * 10 - p[1] * 2.5])
    distance = (5 / 15 + 2 / 15 + 3 / 15) / 2
    assert float(state["alpha"]) == pytest.approx(1 - 0.8 * (1 - distance))
    # a round of the first client alone has seen .4 / 1.0 of what all hold of scarce classes
    counts = state["counts"].double().numpy()
    assert momentum_share(counts, [0], 0.2) == pytest.approx(1 - 0.8 * (1 - distance) * 0.4)
    const, _ = method.start(local_run({"alpha": torch.tensor(0.25), "momentum": torch.tensor([4.0, 0.0, -8.0])}), {})
    grads = torch.tensor([[1.0, 2.0, 3.0]])
    step = LocalStep(grads, torch.zeros(3), torch.zeros(3), const, {}, {})
    assert method.direction(step)[0].tolist() == pytest.approx([0.25 + 3.0, 0.5, 0.75 - 6.0])
    _, sent = method.finish(local_run({}), torch.zeros(3), const, {}, {})
    assert float(sent["pace"]) == pytest.approx(1 / (4 * 0.1))


def test_fedwcm_is_fedcm_where_classes_are_equally_frequent() -> None:
    even, p = [update(0, [3, 3, 3], [1.0, 0, 0], 1.0), update(1, [5, 5, 5], [0, 1.0, 0], 1.0)], np.array([0.4, 0.6])
    method = FedWCM(alpha=0.1)
    assert method.weights(p, even, method.init_server(3, 3, 3)) == pytest.approx(p)
    assert momentum_share(np.array([[3.0, 3, 3], [5, 5, 5]]), [0, 1], 0.1) == pytest.approx(0.1)


# -- FedNPC


def test_fednpc_steps_as_torch_s_sgd_with_momentum_does() -> None:
    torch.manual_seed(0)
    layer, rng = nn.Linear(5, 3), torch.Generator().manual_seed(7)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    got = on_noise(weight, bias, rng, steps=3, noise=40, lr=0.5)
    optimizer, rng = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9), torch.Generator().manual_seed(7)
    for w, b in got:
        labels = torch.randint(0, 3, (40,), generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(torch.randn(40, 5, generator=rng)), labels).backward()
        optimizer.step()
        assert torch.allclose(w, layer.weight, atol=1e-6) and torch.allclose(b, layer.bias, atol=1e-6)


def test_fednpc_keeps_the_step_that_is_best_on_validation() -> None:
    method, seen = FedNPC(steps=7, every=3, noise=20), []
    made = problem(method, awkward_federation(validation=0.3))
    view = replace(server(3), x=made.model.vector.clone(), classifier=made.model.classifier)

    def best(at: int) -> Tensor:
        def compare(models: Any) -> np.ndarray:
            seen[:] = models
            return np.eye(len(models))[at]

        return method.conclude(replace(view, compare=compare), {})

    assert torch.equal(best(0), view.x) and len(seen) == 4  # before any, after 3, 6 and 7 steps
    assert torch.equal(best(2), seen[2]) and not torch.equal(seen[2], seen[3])
    nothing = replace(view, compare=lambda models: np.full(len(models), np.nan))
    assert torch.equal(method.conclude(nothing, {}), seen[3])


def test_fednpc_s_model_is_no_worse_on_validation_and_never_sees_the_test_set() -> None:
    made = problem(FedNPC(steps=6, noise=50, step_lr=2.0), awkward_federation(validation=0.4), metric="macro_f1")
    state = train(made, 3)
    looked, confusion = [], made.engine.confusion
    made.engine.confusion = lambda x, split: (looked.append(split), confusion(x, split))[1]  # type: ignore[method-assign]
    kept = kept_model(made, Settings.of(metric="macro_f1"), state)
    assert "test" not in looked

    def value(x: Tensor) -> float:
        return float(made.metrics(confusion(x, "validation"))["macro_f1"])

    assert value(kept) >= value(state.x)
