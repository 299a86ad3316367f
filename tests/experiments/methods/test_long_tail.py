"""FedLC, FedETF, FedLoGe, CCVR and FedYoYo against numbers from an independent reading of their papers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtail as ft
from fedtail.data.images.augment import PAD, apply_augment
from fedtail.errors import FedtailError
from fedtail.methods.base import Batch, LocalRun
from fedtail.models import FlatModel, build_model
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.validation import kept_model
from fedtail.runs.build import assemble
from fedtail.settings import Settings
from fedtail_experiments.methods.ccvr import CCVR, virtual_features
from fedtail_experiments.methods.fedetf import FedETF
from fedtail_experiments.methods.fedlc import FedLC
from fedtail_experiments.methods.fedloge import FedLoGe
from fedtail_experiments.methods.fedyoyo import FedYoYo
from fedtail_experiments.methods.measurements import (
    EFFECTIVE_NUMBERS,
    Moments,
    class_moments,
    effective_numbers,
    merged_moments,
)
from fedtail_experiments.methods.retraining import fit_linear
from fedtail_experiments.methods.views import apply_strong, draw_strong, draw_views
from fedtail_experiments.models.classifiers import SimplexETF, TwoHeads, sparse_simplex
from tests.methods.federations import problem, train

COUNTS = np.array([625, 16, 1, 0])


def local_run(message: dict[str, Tensor] | None = None, round: int = 0) -> LocalRun:
    return LocalRun(
        client=0, round=round, counts=COUNTS, resampled=COUNTS, n_params=3, steps=1, lr=0.1, message=message or {}
    )


def batch(y: list[int]) -> Batch:
    return Batch(torch.tensor(y), torch.ones(len(y)))


def test_fedlc_takes_the_fourth_root_of_the_counts() -> None:
    method, z = FedLC(tau=2.0), torch.tensor([[0.3, -1.0, 0.5, 2.0]])
    const, _ = method.start(local_run(), {})
    (loss,), _ = method.loss(z, batch([2]), const, {})
    # 625^-1/4 = .2, 16^-1/4 = .5, 1; the absent class is out
    shifted = [0.3 - 0.4, -1.0 - 1.0, 0.5 - 2.0]
    assert float(loss) == pytest.approx(math.log(sum(map(math.exp, shifted))) - shifted[2], rel=1e-6)


def test_fedlc_is_the_paper_s_pairwise_margin() -> None:
    z, y, n, tau = np.array([0.3, -1.0, 0.5, 7.0]), 1, [625, 16, 1], 0.5
    method = FedLC(tau=tau)
    const, _ = method.start(local_run(), {})
    (loss,), _ = method.loss(torch.tensor(z[None]), batch([y]), const, {})
    margins = [tau * (n[y] ** -0.25 - n[i] ** -0.25) for i in range(3)]  # Delta(y, i); that of the absent class is -inf
    others = sum(math.exp(z[i] - z[y] + margins[i]) for i in range(3) if i != y)
    assert float(loss) == pytest.approx(math.log(1 + others), rel=1e-6)


def test_fedetf_is_a_fixed_simplex_of_any_rotation() -> None:
    torch.manual_seed(0)
    z, c = torch.randn(5, 4, dtype=torch.float64), 4
    etf = math.sqrt(c / (c - 1)) * (torch.eye(c, dtype=torch.float64) - 1 / c)
    cosines = F.normalize(etf, dim=0).T @ F.normalize(etf, dim=0)
    assert torch.allclose(cosines[~torch.eye(c, dtype=torch.bool)], torch.tensor(-1 / 3, dtype=torch.float64))
    head = SimplexETF().double()
    assert torch.allclose(head(z), 10.0 * F.normalize(z, dim=1) @ etf)
    turn, _ = torch.linalg.qr(torch.randn(c, c, dtype=torch.float64))  # the authors' simplex: turned at random
    assert torch.allclose(head(z), 10.0 * F.normalize(z @ turn.T, dim=1) @ (turn @ etf))


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_fedetf_is_balanced_softmax_where_an_absent_class_counts_as_one_sample(gamma: float) -> None:
    z, y = np.array([[0.3, -1.0, 0.5, 2.0], [1.5, 0.2, -0.7, 0.1], [-2.0, 0.4, 0.0, 4.0]]), [0, 1, 2]
    method = FedETF(gamma=gamma)
    const, _ = method.start(local_run(), {})
    losses, _ = method.loss(torch.as_tensor(z), batch(y), const, {})
    mass = np.array([625.0, 16.0, 1.0, 1.0]) ** gamma * np.exp(z)
    expected = [-math.log(row[c] / row.sum()) for row, c in zip(mass, y, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_fedloge_trains_features_by_the_simplex_and_answers_by_the_realigned_head() -> None:
    torch.manual_seed(1)
    head = TwoHeads(nn.Linear(12, 4))
    f, y = torch.randn(6, 12, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1])
    losses, _ = FedLoGe().loss(head.train()(f), batch(y.tolist()), {}, {})
    simplex, own = F.cross_entropy(f @ head.simplex, y), F.cross_entropy(head.linear(f.detach()), y)
    assert float(losses.detach().mean()) == pytest.approx(float((simplex + own).detach()))
    (through,) = torch.autograd.grad(losses.mean(), [f], retain_graph=True)
    assert torch.allclose(through, torch.autograd.grad(simplex, [f])[0])  # nothing comes through the head
    with torch.no_grad():
        head.linear.weight[0] *= 50.0
        answers = head.eval()(f)
        assert answers.shape == (6, 4)
        head.linear.weight[0] /= 7.0
        assert torch.allclose(head(f), answers, atol=1e-5)  # the length of a row does not count


def test_the_sparse_simplex_is_sparse_and_wide() -> None:
    m = sparse_simplex(64, 10)
    assert float((m == 0).float().mean()) == pytest.approx(0.6, abs=0.08)
    assert torch.allclose(m.norm(dim=0), torch.ones(10))
    cosines = (m.T @ m)[~torch.eye(10, dtype=torch.bool)]
    assert float(cosines.max()) < 0.0 and float(cosines.mean()) == pytest.approx(-1 / 9, abs=0.02)
    assert torch.equal(m, sparse_simplex(64, 10))


def test_moments_of_clients_merge_to_those_of_all_samples() -> None:
    torch.manual_seed(2)
    f, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
    parts = [class_moments(f[a:b], y[a:b], 4) for a, b in ((0, 7), (7, 8), (8, 40))]
    merged = merged_moments([Moments.unpacked(p.packed()) for p in parts])
    assert merged.counts.tolist() == [*np.bincount(y, minlength=4)]
    for c in range(3):
        mine = f[y == c].double().numpy()
        assert np.allclose(merged.means[c], mine.mean(0))
        assert np.allclose(merged.covariances[c], np.cov(mine.T))


def test_virtual_features_have_the_moments_they_come_from_and_ccvr_retrains_on_them() -> None:
    torch.manual_seed(3)
    f = torch.cat([torch.randn(30, 3) + 1, 2 * torch.randn(9, 3) - 2])
    moments = class_moments(f, torch.tensor([0] * 30 + [2] * 9), 3)
    drawn, labels = virtual_features(moments, 60_000, torch.Generator().manual_seed(0))
    assert labels.unique().tolist() == [0, 2]
    assert np.allclose(np.cov(drawn[labels == 2].T.numpy()), moments.covariances[2], atol=0.15)

    made = problem(CCVR(virtual=200))
    state = train(made, 4)
    before, kept = state.x, kept_model(made, Settings.of(), state)
    same = torch.ones_like(before, dtype=torch.bool)
    for part in made.model.classifier(same):
        part.fill_(False)
    assert torch.equal(kept[same], before[same]) and not torch.equal(kept, before)
    hits = [made.engine.confusion(x, "test").diagonal().sum() for x in (before, kept)]  # the test set is balanced
    assert hits[1] > hits[0]


def test_a_linear_layer_is_fitted_as_scikit_learn_does_it() -> None:
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(4)
    y = rng.integers(0, 3, 300)
    x = rng.normal(size=(300, 4)) * 5 + 3 + np.eye(3, 4)[y] * 6
    theirs = LogisticRegression(C=1e6, max_iter=5000).fit(x, y).predict_proba(x)
    start = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    w, b = fit_linear(*start, torch.as_tensor(x), torch.as_tensor(y), steps=20_000, lr=0.5)
    assert np.allclose(torch.softmax(torch.as_tensor(x) @ w.T + b, 1), theirs, atol=2e-3)


def test_a_decayed_layer_is_ridge_on_features_of_one_size() -> None:
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(5)
    y = rng.integers(0, 3, 30)
    x = rng.normal(size=(30, 50)) * 4 - 2 + np.eye(3, 50)[y] * 3  # more dimensions than samples
    size = float(np.sqrt(((x - x.mean(0)) ** 2).mean()))
    theirs = LogisticRegression(C=1 / (0.3 * 30), max_iter=5000, tol=1e-10).fit((x - x.mean(0)) / size, y)
    start = torch.zeros(3, 50, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    w, _ = fit_linear(*start, torch.as_tensor(x), torch.as_tensor(y), steps=5000, lr=0.1, decay=0.3)
    assert np.allclose(w * size, theirs.coef_, atol=1e-4)


def test_methods_that_set_the_classifier_refuse_a_model_without_a_plain_one() -> None:
    model = FlatModel(build_model("cosine", (6,), 4))
    with pytest.raises(FedtailError, match="not a plain linear layer with a bias"):
        model.classifier(model.vector)


def test_effective_numbers_count_directions() -> None:
    eye = torch.eye(8)
    same = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])
    assert effective_numbers(torch.cat([eye, eye]), torch.zeros(16).long(), 2).tolist() == [16.0, 0.0]
    assert effective_numbers(same, torch.zeros(2).long(), 1).tolist() == [2.0]  # they cancel; at most the samples
    lean = torch.tensor([[3.0, 0.1], [3.0, -0.1], [-6.0, 0.0]])  # two of three to one side
    unit = F.normalize(lean.double(), dim=1)
    assert float(effective_numbers(lean, torch.zeros(3).long(), 1)) == pytest.approx(
        min(1 / float((unit @ unit.T).mean()), 3.0)
    )


def test_effective_numbers_are_what_a_loop_over_batches_and_pairs_says() -> None:
    rng = np.random.default_rng(11)
    y = rng.integers(0, 3, 150)
    f = rng.normal(size=(150, 6)) + np.eye(3, 6)[y] * 4
    expected = np.zeros(4)
    for first in range(0, 150, 64):
        piece = slice(first, first + 64)
        for c in range(3):
            off = f[piece][y[piece] == c] - f[y == c].mean(0)
            cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a in off for b in off]
            expected[c] += min(1 / np.mean(cosines), len(off))
    found = effective_numbers(torch.as_tensor(f), torch.as_tensor(y), 4)
    assert np.allclose(found, expected) and bool((found[:3] < torch.bincount(torch.as_tensor(y))).any())


def test_fedyoyo_s_server_keeps_nine_tenths_of_what_it_knew() -> None:
    method, sent = FedYoYo(), {0: torch.tensor([3.0, 0.0]), 1: torch.tensor([4.0, 1.0])}
    state = method.init_server(2, 2, 5)
    told: Any = SimpleNamespace(
        x=torch.zeros(5), n_classes=2, measure=lambda what, x=None: {EFFECTIVE_NUMBERS: sent}[what]
    )
    state = method.before_round(told, state)
    assert state["numbers"].tolist() == [8.0, 2.0]  # one and what all sent
    assert method.broadcast(state)["prior"].tolist() == pytest.approx([0.8, 0.2])
    sent[1] = torch.tensor([14.0, 3.0])
    state = method.before_round(told, state)
    assert state["numbers"].tolist() == pytest.approx([0.9 * 8 + 0.1 * 18, 0.9 * 2 + 0.1 * 4])
    sent[0] = torch.tensor([0.0, 0.0])
    state = method.before_round(told, state)
    assert state["numbers"].tolist() == pytest.approx([0.9 * 9.0 + 0.1 * 15, 0.9 * 2.2 + 0.1 * 4])


def test_fedyoyo_distils_from_the_first_round_on_and_fully_after_the_warm_up() -> None:
    method = FedYoYo(distill=4.0, warmup=50)
    prior = {"prior": torch.full((4,), 0.25)}
    weights = [float(method.start(local_run(prior, round=t), {})[0]["distill"]) for t in (0, 24, 49, 200)]
    assert weights == pytest.approx([4 * 1 / 50, 4 * 25 / 50, 4.0, 4.0])


def test_fedyoyo_is_what_a_loop_over_samples_says() -> None:
    torch.manual_seed(7)
    method = FedYoYo(tau=1.5, gamma=0.1, distill=4.0, temperature=1.5, warmup=10)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1])
    const, state = method.start(local_run({"prior": prior}, round=5), {})
    z, y = torch.randn(8, 4), [0, 0, 1, 1, 2, 2, 0, 0]
    losses, after = method.loss(z, batch(y), const, state)
    own = torch.as_tensor(COUNTS / COUNTS.sum()).float()
    mixed = 0.9 * prior + 0.1 * own
    assert torch.allclose(after["prior"], mixed)
    z = z + torch.log(mixed**1.5 + 1e-9)
    kl, right = 0.0, 0
    for i in range(0, 8, 2):
        if int(z[i].argmax()) == y[i]:
            t, s = torch.softmax(z[i] / 1.5, 0), torch.softmax(z[i + 1] / 1.5, 0)
            kl, right = kl + float((t * (t / s).log()).sum()), right + 1
    assert right
    expected = float(F.cross_entropy(z, torch.tensor(y))) + 4.0 * 0.6 * kl / right  # the sixth of ten rounds
    assert float(losses.mean()) == pytest.approx(expected, rel=1e-5)
    padded = Batch(torch.tensor([*y, 0, 0]), torch.tensor([1.0] * 8 + [0.0] * 2))
    more, _ = method.loss(torch.cat([z - torch.log(mixed**1.5 + 1e-9), torch.randn(2, 4)]), padded, const, state)
    assert torch.allclose(more[:8], losses, atol=1e-5)


def test_strong_views_leave_weak_ones_alone_and_stay_in_range() -> None:
    rng = np.random.default_rng(8)
    x = torch.randn(6, 3, 16, 16)
    draws = torch.as_tensor(draw_views("flip", 3, rng, rng))
    assert torch.equal(draws[::2, 3:], torch.zeros(3, 9, dtype=torch.int64)) and bool((draws[1::2, 3:] != 0).any())
    out = apply_augment(x, draws)
    assert torch.equal(out[::2], apply_augment(x[::2], draws[::2, :3]))
    assert all(not torch.equal(a, b) for a, b in zip(out[1::2], x[1::2], strict=True))
    turned = torch.zeros(1, 9, dtype=torch.int64)
    assert torch.equal(apply_strong(x[:1], turned), x[:1])
    turned[0, 5] = 1000  # brightness alone
    assert torch.allclose(apply_strong(x[:1], turned), x[:1] + 0.9)
    many = draw_strong(4000, rng)
    assert set((many[:, :8] != 0).sum(1).tolist()) <= {1, 2} and many[:, :8].min() >= -1000
    assert draws[0, :2].tolist() == [PAD, PAD]


@pytest.mark.parametrize("path", ["batched", "graph"])
def test_two_views_of_images_agree_on_every_path(path: str) -> None:
    rng = np.random.default_rng(9)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, 3, n)
        return (rng.normal(size=(n, 1, 8, 8)) + y[:, None, None, None]).astype(np.float32), y

    federation = ft.Federation.from_arrays([draw(30), draw(13)], draw(20), classes=["a", "b", "c"])

    def trained(path: str) -> Tensor:
        settings = Settings.of(rounds=2, lr=0.05, batch_size=8, seed=1, path=path, validate_every=0)
        module = build_model("mlp", (1, 8, 8), 3, seed=2, hidden=(8,))
        made = assemble(federation, module, FedYoYo(warmup=1), RATES.build("uniform", 2, rate=0.5), settings)
        return train_rounds(made, settings, made.begin()).x

    assert torch.allclose(trained(path), trained("reference"), atol=1e-5)


def test_fedetf_trains_a_head_that_starts_at_zero() -> None:
    """Heads on frozen features do; brought to length 1, zeros gave gradients without bounds and one answer for all."""
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 16) + 3 * F.one_hot(y, 16)
    model = build_model("linear", (16,), 3, classifier="etf")
    assert torch.equal(model(x), build_model("linear", (16,), 3, classifier="etf")(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None) < 100
        optimizer.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.9
