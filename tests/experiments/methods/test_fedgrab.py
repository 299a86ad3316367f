from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedtail.core.records import Tensors
from fedtail.methods import Batch, LocalRun
from fedtail_experiments.methods.fedgrab import (
    RESTS,
    STATE,
    FedGraB,
    class_thirds,
    classifier_prior,
    gain,
    pid_step,
    rests,
)
from tests.methods.federations import problem, train

C, B = 3, 5


def run_of(round: int = 1, client: int = 0, prior: list[float] | None = None) -> LocalRun:
    message = {} if prior is None else {"prior": torch.tensor(prior)}
    n = np.ones(len(prior) if prior else C, dtype=int)
    return LocalRun(client, round, n, n, 1, 1, 0.1, message)


def batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(3)
    return [
        (torch.as_tensor(rng.standard_normal((B, C)), dtype=torch.float32), torch.as_tensor(rng.integers(0, C, B)))
        for _ in range(n)
    ]


def test_golden_gain() -> None:
    values = gain(torch.tensor([0.0, 1.0, -1.0, 400.0, -400.0], dtype=torch.float64))
    np.testing.assert_allclose(values, [1.0, 1.548281, 0.631373, 10.0, 0.0], atol=5e-7)


def test_golden_controller() -> None:
    zero, half = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
    first = pid_step(zero, half, zero, zero, 10.0, 0.01, 0.1)
    assert float(first) == pytest.approx(5.055)
    assert float(pid_step(first, half, half, zero, 10.0, 0.01, 0.1)) == pytest.approx(5.010)


@pytest.mark.parametrize(("limit", "low", "high"), [(1.0, 0.631373, 1.548281), (2.0, 0.392703, 2.319693)])
def test_the_output_is_limited_and_so_are_the_weights(limit: float, low: float, high: float) -> None:
    method = FedGraB(bypass="none", limit=limit)
    const, state = method.start(run_of(), {})
    for _ in range(30):  # class 0 alone: the negatives of the others' outputs pile up
        _, state = method.loss(torch.zeros(B, C), Batch(torch.zeros(B, dtype=torch.int64), torch.ones(B)), const, state)
    assert state["output"].abs().tolist() == [limit] * C
    np.testing.assert_allclose(gain(torch.tensor([-limit, limit], dtype=torch.float64)), [low, high], atol=5e-7)


class AuthorsBalancer:
    """FedGraB 7394da6, util/losses.py (PIDLOSS, PID) for one client, written again with plain loops and numbers."""

    def __init__(self, kp: float, ki: float, kd: float) -> None:
        self.k = (kp, ki, kd)
        self.pos, self.neg = [0.0] * C, [0.0] * C
        self.error = [[0.0, 0.0, 0.0] for _ in range(C)]
        self.out = [0.0] * C

    def gradient(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        kp, ki, kd = self.k
        weight = np.zeros((len(labels), C))
        for c in range(C):
            e = self.error[c]
            e[2], e[1] = e[1], e[0]
            e[0] = 0 - (self.pos[c] - self.neg[c])
            self.out[c] += kp * (e[0] - e[1]) + ki * e[0] + kd * (e[0] - 2.0 * e[1] + e[2])
            self.out[c] = min(max(self.out[c], -100), 100)
            for i, y in enumerate(labels):
                u = self.out[c] if y == c else -self.out[c]
                weight[i, c] = (10 / 9) / ((1 / 9) + np.exp(-0.5 * u))
        grad = np.zeros_like(weight)
        for i, y in enumerate(labels):
            for c in range(C):
                p = 1 / (1 + np.exp(-logits[i, c]))
                grad[i, c] = weight[i, c] * (p - (y == c)) / len(labels)
                if y == c:
                    self.pos[c] += abs(grad[i, c])
                else:
                    self.neg[c] += abs(grad[i, c])
        return grad


def test_gradients_over_many_steps_are_the_authors() -> None:
    method = FedGraB(bypass="none", limit=100.0)
    authors = AuthorsBalancer(method.kp, method.ki, method.kd)
    const, state = method.start(run_of(), {})
    for logits, y in batches(12):
        z = logits.clone().requires_grad_()
        out, state = method.loss(z, Batch(y, torch.ones(B)), const, state)
        grad = torch.autograd.grad(out.sum() / B, [z])[0]
        np.testing.assert_allclose(grad.numpy(), authors.gradient(logits.double().numpy(), y.numpy()), atol=2e-5)
        plain = F.binary_cross_entropy_with_logits(logits, F.one_hot(y, C).float(), reduction="none").sum(-1)
        torch.testing.assert_close(out.detach(), plain)
    np.testing.assert_allclose(state["output"].numpy(), authors.out, rtol=1e-3)


def test_balancers_go_on_where_the_last_round_left_them() -> None:
    method, steps = FedGraB(bypass="none"), batches(6)

    def go(state: Tensors, const: Tensors, part: list[tuple[torch.Tensor, torch.Tensor]]) -> Tensors:
        for logits, y in part:
            _, state = method.loss(logits, Batch(y, torch.ones(B)), const, state)
        return state

    const, state = method.start(run_of(), {})
    whole = go(state, const, steps)
    kept, extras = method.finish(run_of(), torch.zeros(1), const, go(state, const, steps[:3]), {})
    assert extras == {}
    const, state = method.start(run_of(round=2), kept)
    again = go(state, const, steps[3:])
    for key in STATE:
        torch.testing.assert_close(again[key], whole[key])


def test_only_tail_classes_are_balanced_and_the_rest_stay_at_rest() -> None:
    method = FedGraB(balance="tail", bypass="none")
    const, state = method.start(run_of(prior=[0.6, 0.37, 0.03]), {})
    assert const["on"].tolist() == [[False, False, True]]
    for logits, y in batches(3):
        _, state = method.loss(logits, Batch(y, torch.ones(B)), const, state)
    assert state["output"][:2].tolist() == [0.0, 0.0]
    assert state["output"][2] != 0
    _, later = method.start(run_of(round=2, prior=[0.03, 0.6, 0.37]), state)
    assert all(float(v.abs().sum()) == 0 for v in later.values())


def authors_rests(n_classes: int, rng: np.random.Generator) -> list[bool]:
    """FedGraB, util/losses.py, the global mode of the gradient hook: classes in order of frequency; the place in the
    list of probabilities moves on only when a class was skipped."""
    probabilities = [0.1 ** (i / (n_classes - 1.0)) for i in range(n_classes)]
    place, out = 0, []
    for _ in range(n_classes):
        skip = bool(rng.random() < probabilities[place])
        out.append(skip)
        place += skip
    return out


def test_rests_are_drawn_as_the_authors_draw_them() -> None:
    counts = np.array([50, 3, 900, 20, 7, 100, 400, 1, 200, 10])
    order = np.argsort(-counts)
    found = rests(counts, 20_000, np.random.default_rng(0)).mean(0)[order]
    rng = np.random.default_rng(1)
    want = np.mean([authors_rests(10, rng) for _ in range(20_000)], axis=0)
    np.testing.assert_allclose(found, want, atol=0.015)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.29, abs=0.015)


def test_a_balancer_rests_in_the_steps_that_were_drawn() -> None:
    method = FedGraB()
    const, state = method.start(run_of(), {})
    assert const["on"].shape == (RESTS, C)
    for i, (logits, y) in enumerate(batches(8)):
        _, new = method.loss(logits, Batch(y, torch.ones(B)), const, state)
        moved = new["positive"] + new["negative"] != state["positive"] + state["negative"]
        assert moved.tolist() == const["on"][i].tolist()
        state = new


def test_what_version_0_1_wrote_is_read() -> None:
    assert (FedGraB(bypass=False).bypass, FedGraB(bypass=True).bypass) == ("none", "round")


def test_a_rested_balancer_keeps_its_state() -> None:
    method = FedGraB(bypass="round")
    rested = 0
    kept = {key: torch.rand(C) for key in STATE}
    for client in range(20):
        const, state = method.start(run_of(client=client, prior=[0.6, 0.3, 0.1]), kept)
        off = ~const["on"][0]
        assert bool(off[0])  # rank 0 rests with probability 1
        rested += int(off.sum())
        logits, y = batches(1)[0]
        _, new = method.loss(logits, Batch(y, torch.ones(B)), const, state)
        for key in STATE:
            assert torch.equal(new[key][off], kept[key][off])
    assert 20 < rested < 60


# -- the server's prior analyser -----------------------------------------------------------------------------


def authors_thirds(values: list[float]) -> list[int]:
    """FedGraB, util/wene.py, shot_split with thresholds 75 and 95: cut where the cumulative percentage crosses."""
    order = sorted(range(len(values)), key=lambda c: -values[c])
    upper = np.cumsum([values[c] for c in order]) / sum(values) * 100
    lower = [0.0, *upper[:-1]]
    cut = [next(i for i in range(len(order)) if t > lower[i] and t <= upper[i]) for t in (75, 95)]
    out = [0] * len(values)
    for rank, c in enumerate(order):
        out[c] = 0 if rank <= cut[0] else 1 if rank <= cut[1] else 2
    return out


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=12))
def test_head_middle_and_tail_are_the_authors(values: list[float]) -> None:
    shares = np.cumsum(sorted(values, reverse=True)) / sum(values)
    if np.abs(shares[:, None] - [0.75, 0.95]).min() < 1e-6:
        return  # exactly on a threshold rounding decides
    assert class_thirds(torch.tensor(values, dtype=torch.float64)).tolist() == authors_thirds(values)


def test_the_prior_is_the_authors_normalised_row_norms() -> None:
    weight = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    norms = np.linalg.norm(weight.numpy(), axis=1)
    z = (norms - norms.mean()) / norms.std()
    z = z - z.min()
    np.testing.assert_allclose(classifier_prior(weight), z / z.sum())


def test_equal_norms_give_a_uniform_prior_without_a_tail() -> None:
    prior = classifier_prior(torch.eye(10))
    np.testing.assert_allclose(prior, 0.1)
    assert class_thirds(prior).tolist().count(2) == 0
    assert class_thirds(torch.zeros(4)).tolist() == [0, 0, 0, 0]


def test_the_prior_averages_over_rounds_and_the_first_round_has_none() -> None:
    made = problem(FedGraB(balance="tail"))
    state = train(made, 3)
    first, second, third = (r["method"]["prior"] for r in state.history)
    assert first == [0.0] * 4
    assert sum(third) == pytest.approx(1.0)
    assert second != third
    assert float(state.method["rounds"]) == 2
