from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedtail.core.records import Update
from fedtail.methods import Batch, LocalRun
from fedtail_experiments.methods import fednoro
from fedtail_experiments.methods.fednoro import FedNoRo, distances, noisy_clients
from tests.methods.federations import problem, train

C, B = 4, 6


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(2)
    logits, teacher = (torch.as_tensor(rng.standard_normal((B, C))) for _ in range(2))
    return logits, teacher, torch.as_tensor(rng.choice([0, 1, 3], B))


@pytest.mark.parametrize("kd", [0.0, 0.3, 0.8])
def test_the_loss_of_a_noisy_client_is_the_authors(kd: float) -> None:
    # FedNoRo 6719ad7, utils/losses.py LA_KD and local_training.py: soft labels at temperature 0.8, batchmean
    logits, teacher, y = tensors()
    counts = np.array([20, 5, 0, 2])
    message = {"kd_weight": torch.tensor([kd])}
    const, state = FedNoRo().start(LocalRun(0, 0, counts, counts, 1, 1, 0.1, message), {})
    got, _ = FedNoRo().loss(logits, Batch(y, torch.ones(B), teacher), const, state)

    x = logits + torch.log(torch.as_tensor(counts) / 27)
    log_pred = torch.log_softmax(x, dim=-1)
    log_pred = torch.where(torch.isinf(log_pred), torch.zeros_like(log_pred), log_pred)
    soft = torch.softmax(teacher / 0.8, dim=1)
    want = kd * F.kl_div(log_pred, soft, reduction="batchmean") + (1 - kd) * F.nll_loss(log_pred, y)
    assert float(got.mean()) == pytest.approx(float(want), rel=1e-5)


def test_the_distillation_weight_rises_as_in_the_paper() -> None:
    weight = FedNoRo().kd_weight
    assert weight(10) == pytest.approx(0.8 * np.exp(-5))
    assert weight(30) == pytest.approx(0.8 * np.exp(-5 * (1 - 20 / 39) ** 2))
    assert weight(49) == weight(80) == pytest.approx(0.8)


def test_the_mixture_finds_clients_whose_losses_stand_out() -> None:
    rng = np.random.default_rng(0)
    losses = 0.5 + 0.05 * rng.standard_normal((12, 3))
    losses[[2, 5, 9]] += 1.0
    losses[0, 1] = losses[7, 2] = np.nan
    assert np.flatnonzero(noisy_clients(losses)).tolist() == [2, 5, 9]


def test_a_class_nobody_has_and_equal_clients_are_no_reason_to_fail() -> None:
    losses = np.random.default_rng(1).random((6, 3))
    losses[:, 1] = np.nan
    assert noisy_clients(losses).shape == (6,)
    assert not noisy_clients(np.ones((6, 3))).any()
    assert not noisy_clients(np.full((6, 3), np.nan)).any()
    assert not noisy_clients(np.random.default_rng(1).random((2, 3))).any()


def updates(vectors: np.ndarray) -> list[Update]:
    return [Update(k, torch.as_tensor(v).unsqueeze(0), 1, (1,), (0.0,)) for k, v in enumerate(vectors)]


def test_updates_are_compared_a_few_values_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(5).standard_normal((6, 101))
    noisy = np.array([True, False, False, True, False, True])
    whole = distances(updates(vectors), noisy)
    taken: list[int] = []
    monkeypatch.setattr(fednoro, "AT_ONCE", 60)
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda rows: taken.append(sum(map(len, rows))) or stack(rows))
    np.testing.assert_allclose(distances(updates(vectors), noisy), whole, rtol=1e-12)
    assert max(taken) <= 60 and sum(taken) == vectors.size


def test_aggregation_is_distance_aware() -> None:
    # FedNoRo 6719ad7, utils/FedAvg.py DaAgg, with one tensor per model
    rng = np.random.default_rng(4)
    vectors, n = rng.standard_normal((5, 7)), np.array([10.0, 20, 30, 40, 50])
    noisy, clean = [1, 4], [0, 2, 3]
    distance = np.zeros(5)
    for k in noisy:
        distance[k] = min(np.linalg.norm(vectors[k] - vectors[c]) for c in clean)
    want = n / n.sum() * np.exp(-distance / distance.max())
    state = {"noisy": torch.tensor([0.0, 1, 0, 0, 1]), "kd_weight": torch.zeros(())}
    got = FedNoRo().weights(n / n.sum(), updates(vectors), state)
    np.testing.assert_allclose(got, want / want.sum(), rtol=1e-6)


def test_without_clean_or_without_noisy_clients_aggregation_is_fedavgs() -> None:
    p, vectors = np.array([0.3, 0.7]), np.eye(2)
    for flags in ([0.0, 0.0], [1.0, 1.0]):
        state = {"noisy": torch.tensor(flags), "kd_weight": torch.zeros(())}
        assert FedNoRo().weights(p, updates(vectors), state) is p


def test_only_noisy_clients_distil_and_only_after_the_warm_up() -> None:
    history = train(problem(FedNoRo(warmup=1, ramp=2)), 3).history
    assert history[0]["method"] == {"noisy_clients": [], "kd_weight": 0.0}
    assert 0 < len(history[1]["method"]["noisy_clients"]) < 5
    state = {"noisy": torch.tensor([0.0, 1.0]), "kd_weight": torch.tensor(0.4)}
    assert [float(FedNoRo().message(state, k)["kd_weight"]) for k in (0, 1)] == pytest.approx([0.0, 0.4])
