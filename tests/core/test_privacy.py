"""Noise with the method's own bound as sensitivity, and an epsilon that can be checked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from fedtail import fit
from fedtail.core.privacy import (
    draw_noise,
    gaussian_epsilon,
    limit,
    noisy_limit,
    secure_normal,
    sensitivity,
)
from fedtail.data import DATASETS, Federation, partition
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.rates import RATES
from fedtail.report import load_run, write_report
from fedtail.rounds.privacy import count_undone, privatize
from fedtail.runs.config import check_config
from fedtail.runs.execution import run
from fedtail.settings import PrivacySettings


@pytest.fixture(scope="module")
def federation() -> Federation:
    pooled = DATASETS.build("blobs", n_max=100, n_classes=3, n_features=4)
    return partition(pooled.train, pooled.test, clients=3, classes=pooled.classes)


def test_epsilon_is_at_most_the_closed_form_of_renyi_composition() -> None:
    """T Gaussian mechanisms: min over alpha of T alpha / (2 z^2) + log(1/delta) / (alpha - 1)."""
    for noise, rounds in ((1.0, 10), (4.0, 100), (0.7, 1)):
        alphas = np.linspace(1.01, 64, 20000)
        classic = np.min(rounds * alphas / (2 * noise**2) + np.log(1e5) / (alphas - 1))
        found = gaussian_epsilon({noise: rounds}, 1e-5)
        assert 0.7 * classic < found < classic
    twenty, ten, quiet = (gaussian_epsilon(r, 1e-5) for r in ({1.0: 20}, {1.0: 10}, {2.0: 10}))
    assert twenty > ten > quiet


def convolved(releases: dict[float, int], delta: float) -> float:
    """A second accountant, which knows no theorem: the privacy losses of single releases on a grid, convolved."""
    width, step = 1 << 20, 2e-4
    loss = (np.arange(width) - width // 2) * step
    spectrum = np.ones(width // 2 + 1, dtype=complex)
    for noise, times in releases.items():
        mean, spread = 1 / (2 * noise**2), 1 / noise  # of log p(y)/q(y) under p
        mass = np.exp(-((loss - mean) ** 2) / (2 * spread**2))
        spectrum *= np.fft.rfft(np.fft.ifftshift(mass / mass.sum())) ** times
    total = np.fft.fftshift(np.fft.irfft(spectrum, width))

    def spent(epsilon: float) -> float:
        above = loss > epsilon
        return float((total[above] * -np.expm1(epsilon - loss[above])).sum())

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("releases", [{1.0: 1}, {1.0: 10}, {4.0: 100}, {0.7: 1, 2.0: 5}, {5.0: 1, 10.0: 40}])
def test_epsilon_is_that_of_privacy_losses_convolved_on_a_grid(releases: dict[float, int]) -> None:
    exact = gaussian_epsilon(releases, 1e-5)
    assert convolved(releases, 1e-5) == pytest.approx(exact, rel=2e-3, abs=1e-3)


def test_what_was_not_released_costs_nothing_and_what_has_no_noise_everything() -> None:
    assert gaussian_epsilon({}, 1e-5) == gaussian_epsilon({1.0: 0}, 1e-5) == 0.0
    assert gaussian_epsilon({0.0: 1}, 1e-5) == np.inf
    assert gaussian_epsilon({0.01: 1000}, 1e-5) > 1e6, "far out too"


def test_noise_of_real_sites_is_cryptographic_and_keyed_by_what_it_covers() -> None:
    drawn = secure_normal(b"s" * 32, "a", 300_001)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3 and abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    assert np.array_equal(drawn[:1000], secure_normal(b"s" * 32, "a", 300_001)[:1000])
    for secret, purpose in ((b"s" * 32, "b"), (b"t" * 32, "a")):
        assert abs(np.corrcoef(drawn, secure_normal(secret, purpose, 300_001))[0, 1]) < 0.01
    one, other = (draw_noise(10, 1.0, None, "x", 0, 0) for _ in range(2))
    assert not torch.equal(one, other), "from the system's entropy"
    seeded = [draw_noise(10, 1.0, 3, "x", 0, 0) for _ in range(2)]
    assert torch.equal(*seeded), "a simulation can be repeated"


def test_seeded_noise_repeats_itself_and_differs_by_client_and_round() -> None:
    first = draw_noise(4, 1.0, 0, "privacy", 0, 0)
    assert torch.equal(first, draw_noise(4, 1.0, 0, "privacy", 0, 0))
    for client, round in ((1, 0), (0, 1)):
        assert not torch.equal(first, draw_noise(4, 1.0, 0, "privacy", client, round))


def test_sensitivity_is_the_most_one_site_can_move_the_aggregate() -> None:
    assert sensitivity([0.5, 0.3, 0.2], [1.0, 3.0, 2.0]) == pytest.approx(0.3 * limit(3.0))


def test_noise_of_the_right_size_passes_and_a_forged_update_does_not() -> None:
    rng = np.random.default_rng(0)
    norms = [np.linalg.norm(rng.normal(0, 0.5, 2000)) for _ in range(200)]
    assert max(norms) + 1.0 < noisy_limit(1.0, 0.5, 2000)
    assert noisy_limit(1.0, 0.5, 2000) < 27, "an update ten times too large is still refused"


@pytest.mark.parametrize("mode", ["central", "local"])
def test_history_tells_what_was_spent_and_noise_changes_the_model(federation: Federation, mode: str) -> None:
    plain = fit(federation, rounds=2)
    noisy = fit(federation, rounds=2, privacy={"mode": mode, "noise": 0.5})
    again = fit(federation, rounds=2, privacy={"mode": mode, "noise": 0.5})
    assert not np.allclose(plain.x, noisy.x) and np.array_equal(noisy.x, again.x)
    spent = [r["privacy"]["epsilon"] for r in noisy.history]
    assert spent == [gaussian_epsilon({0.5: 1}, 1e-5), gaussian_epsilon({0.5: 2}, 1e-5)]
    assert all(r["refused"] == [] for r in noisy.history)


def test_central_noise_has_the_deviation_it_claims(federation: Federation) -> None:
    plain = fit(federation, rounds=1)
    noisy = fit(federation, rounds=1, seed=1, privacy={"mode": "central", "noise": 2.0})
    claimed = 2.0 * noisy.history[0]["privacy"]["sensitivity"]
    assert float((noisy.x - plain.x).std()) == pytest.approx(claimed, rel=0.15)


def test_two_probes_cost_two_releases(federation: Federation) -> None:
    result = fit(federation, rates="fedhoo", rounds=1, privacy={"mode": "local", "noise": 1.0})
    assert result.history[0]["privacy"]["epsilon"] == gaussian_epsilon({1.0: 2}, 1e-5)


def test_what_a_search_has_spent_stays_spent_when_it_is_over(federation: Federation) -> None:
    search = RATES.build("fedhoo", 3, cold_rounds=0, max_rounds=2)
    result = fit(federation, rates=search, rounds=4, privacy={"mode": "local", "noise": 1.0})
    assert [r["searching"] for r in result.history] == [True, False, False, False]
    assert [r["privacy"]["releases"] for r in result.history] == [2, 4, 5, 6]
    assert [r["privacy"]["epsilon"] for r in result.history] == [gaussian_epsilon({1.0: n}, 1e-5) for n in (2, 4, 5, 6)]


@pytest.mark.parametrize("mode", ["central", "local"])
def test_only_trained_parameters_get_noise(federation: Federation, mode: str) -> None:
    """A frozen layer does not move, so its noise would hide nothing and spoil the model."""
    frozen = torch.nn.Linear(4, 8).requires_grad_(False)
    before = frozen.weight.clone()
    net = torch.nn.Sequential(frozen, torch.nn.ReLU(), torch.nn.Linear(8, 3))
    trained = fit(federation, net, rounds=1, privacy={"mode": mode, "noise": 1.0}).module
    assert torch.equal(trained[0].weight, before)


def test_a_searched_weight_decay_leaves_no_bound_to_promise(federation: Federation) -> None:
    decayed = RATES.build("fixed", 3, rates=[5.0] * 3, searches="weight_decay")
    result = fit(federation, rates=decayed, rounds=2, lr=0.1)
    assert all(r["refused"] == [] for r in result.history), "decay alone moves a model beyond lr * steps * H"
    with pytest.raises(FedtailError, match="has no bound"):
        fit(federation, rates=decayed, rounds=1, privacy={"mode": "local"})


@pytest.mark.parametrize(
    ("method", "rates", "reason"),
    [
        (METHODS.build("fedavg"), 0.5, "has no bound"),
        (METHODS.build("fedcgnm", weight_decay=1e-3), 0.5, "has no bound"),
        ("fedcgnm", "fedhoo", "rates 'fedhoo' release more"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(
    federation: Federation, method: object, rates: object, reason: str
) -> None:
    with pytest.raises(FedtailError, match=reason):
        fit(federation, method=method, rates=rates, rounds=1, privacy={"mode": "central"})  # type: ignore[arg-type]


def test_the_report_and_the_result_tell_what_was_spent(tmp_path: Path) -> None:
    config = check_config(
        {
            "data": {"name": "blobs", "clients": 2, "n_max": 60},
            "privacy": {"mode": "central", "noise": 2.0},
            "run": {"rounds": 2, "folder": str(tmp_path)},
        }
    )
    folder = run(config).folder
    assert folder is not None
    spent = json.loads((folder / "result.json").read_text())["privacy"]
    assert spent["epsilon"] == gaussian_epsilon({2.0: 2}, 1e-5)
    page = write_report([load_run(folder)], folder / "report.html", "private").read_text()
    assert "central noise 2, (epsilon, delta) = " in page


def test_a_resumed_round_is_counted_again_where_its_noise_is_not_the_same(federation: Federation) -> None:
    """A server that lost two rounds repeats them with other noise: what it had sent is known nevertheless."""
    written = [{"privacy": {"releases": n}} for n in (1, 2, 3)]
    assert count_undone(written, written[:1]) == 2 and count_undone(written, []) == 3 and count_undone([], []) == 0
    privacy = PrivacySettings(mode="local", noise=1.0)
    for seed, expected in ((None, 4), (0, 2)):
        problem = SimpleNamespace(undone=2, noise_seed=seed)
        task = SimpleNamespace(n_probes=1)
        _, record = privatize(problem, privacy, task, torch.zeros(1), np.ones(1), [], written[:1])  # type: ignore[arg-type]
        assert record["privacy"]["releases"] == expected and problem.undone == 0
