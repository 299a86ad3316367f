"""How updates become one step, and what a hostile site can make of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedtail.core.records import Update
from fedtail.core.robust import bounded, capped, centre, distances
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.rounds import aggregation
from fedtail.rounds.aggregation import Gathered, check_aggregate, combine, limited, rule_of
from fedtail.settings import Settings


def test_inner_products_of_large_updates_are_those_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [torch.randn(2, 3001) for _ in range(4)]
    choice = np.array([0, 1, 1, 0])
    whole = aggregation.inner_products(deltas, choice)
    rows = torch.stack([d[int(c)] for d, c in zip(deltas, choice, strict=True)]).double()
    torch.testing.assert_close(whole, rows @ rows.T)
    monkeypatch.setattr(aggregation, "STACKED", 0)
    monkeypatch.setattr(aggregation, "STACKED_OF_MORE", 500)
    torch.testing.assert_close(aggregation.inner_products(deltas, choice), whole, rtol=1e-14, atol=0)


def updates(*deltas: list[float], probes: int = 1) -> list[Update]:
    return [
        Update(k, torch.tensor(d).repeat(probes, 1), 10, (1,) * probes, (0.0,) * probes) for k, d in enumerate(deltas)
    ]


HONEST = [[1.0, 0.2, 0.0], [0.9, -0.2, 0.1], [1.1, 0.1, -0.1], [1.0, 0.0, 0.1]]
PROBLEM = SimpleNamespace(real=True, method=METHODS.build("fedavg"))


def step(rule: str, deltas: list[list[float]], weights: list[float], reach: float = aggregation.REACH) -> np.ndarray:
    settings = Settings.of(server={"aggregate": rule})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregation, "REACH", reach)
        gathered = Gathered(PROBLEM, settings, updates(*deltas), np.array(weights))
    return gathered.combine(torch.zeros(3), np.zeros(len(deltas), dtype=np.int64)).numpy()


@pytest.mark.parametrize("rule", ["auto", "bounded", "krum"])
@pytest.mark.parametrize("length", [3.0, 1e6, 1e30])
def test_one_hostile_site_of_half_the_weight_cannot_turn_the_step_round(rule: str, length: float) -> None:
    weights = [0.13, 0.13, 0.13, 0.13, 0.48]
    hostile = [*HONEST, [-length, 0.0, 0.0]]
    assert step("mean", hostile, weights)[0] < 0
    assert 0.5 < step(rule, hostile, weights)[0] < 1.2
    assert np.abs(step(rule, hostile, weights)[1:]).max() < 0.2


@pytest.mark.parametrize("rule", ["bounded", "mean"])
def test_honest_updates_are_a_mean_bit_by_bit(rule: str) -> None:
    weights = np.full(4, 0.25)
    mean = combine(torch.zeros(3), weights, updates(*HONEST), np.zeros(4, dtype=np.int64)).numpy()
    np.testing.assert_array_equal(step(rule, HONEST, list(weights), reach=3.0), mean)


def test_a_large_model_is_summed_piece_by_piece_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = updates(*torch.randn(5, 1000).tolist())
    whole = combine(torch.ones(1000), np.linspace(0.1, 0.3, 5), sent, np.zeros(5, dtype=np.int64))
    monkeypatch.setattr(aggregation, "SUMMED", 64)
    assert torch.equal(combine(torch.ones(1000), np.linspace(0.1, 0.3, 5), sent, np.zeros(5, dtype=np.int64)), whole)


def test_the_centre_is_the_geometric_median() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(7, 5))
    found = centre(rows @ rows.T) @ rows
    best = np.linalg.norm(rows - found, axis=1).sum()
    for _ in range(200):
        other = found + rng.normal(scale=0.05, size=5)
        assert np.linalg.norm(rows - other, axis=1).sum() >= best - 1e-6


def test_an_update_that_is_far_is_drawn_to_so_many_median_distances_with_what_goes_beside_it() -> None:
    rows = np.array([*HONEST, [-50.0, 0.0, 0.0]])
    gram = rows @ rows.T
    factors, middle = bounded(gram, 1.5)
    apart = distances(gram, middle)
    assert factors[:4].tolist() == [1.0] * 4 and 0 < factors[4] < 1
    assert factors[4] * apart[4] == pytest.approx(1.5 * np.median(apart))
    sent = updates(*rows.tolist())
    for u in sent:
        u.extras = {"control": torch.ones(1, 2)}
    taken = Gathered(PROBLEM, Settings(), sent, np.full(5, 0.2)).updates
    assert torch.equal(taken[0].extras["control"], torch.ones(1, 2))
    torch.testing.assert_close(taken[4].extras["control"], torch.full((1, 2), float(factors[4])))
    moved = np.linalg.norm(taken[4].delta[0].numpy() - middle @ rows)
    assert moved == pytest.approx(1.5 * np.median(apart), rel=1e-5)


def test_no_cap_is_below_an_equal_share() -> None:
    np.testing.assert_allclose(capped(np.array([0.6, 0.3, 0.1]), 0.1), [1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(("claims", "most"), [([1e9, 10, 20, 30], 0.375), ([1e9] + [10] * 9, 0.25), ([1e9, 1], 1.0)])
def test_who_claims_all_samples_gets_a_limited_share(claims: list[float], most: float) -> None:
    found = limited(np.array(claims) / sum(claims), Settings().server, True)
    assert found[0] <= most + 1e-12 and abs(found.sum() - 1) < 1e-12 and (found > 0).all()
    np.testing.assert_array_equal(limited(np.array([0.9, 0.1, 0.0]), Settings().server, False), [0.9, 0.1, 0.0])


def test_what_each_site_did_is_told_and_who_is_far_is_flagged() -> None:
    gathered = Gathered(PROBLEM, Settings(), updates(*HONEST, [-50.0, 0.0, 0.0]), np.full(5, 0.2))
    told = gathered.influence(np.zeros(5, dtype=np.int64))
    assert told["flagged"] == [4] and told["distance"][4] > 10 and told["cosine"][4] < -0.9 < 0 < told["cosine"][0]
    assert told["weight"][4] < 0.02 and abs(sum(told["share"]) - 1) < 1e-3 and told["norm"][4] == 50.0


def test_candidates_of_a_search_are_bounded_as_the_model_is() -> None:
    """Both probes of a site are held alike, so that base and directions stay sums."""
    two = [Update(k, torch.tensor([d, [2 * v for v in d]]), 10, (1, 1), (0.0, 0.0)) for k, d in
           enumerate([*HONEST, [-900.0, 0.0, 0.0]])]  # fmt: skip
    gathered = Gathered(PROBLEM, Settings(), two, np.full(5, 0.2))
    rates = SimpleNamespace(patterns=lambda: "binary", axes=np.arange(5), n_axes=5)
    found = gathered.candidates(torch.zeros(3), rates, np.arange(5))
    for s in (0, 5, 31):
        choice = (s >> np.arange(5)) & 1
        torch.testing.assert_close(found.model(s), gathered.combine(torch.zeros(3), choice))
        assert found.model(s)[0] > 0


def test_a_rule_that_is_no_mean_is_refused_under_central_noise() -> None:
    settings = Settings.of(server={"aggregate": "krum"}, privacy={"mode": "central"})
    with pytest.raises(FedtailError, match="is calibrated for a mean"):
        check_aggregate(PROBLEM, settings)


def test_control_variates_are_averaged_as_they_are() -> None:
    scaffold = SimpleNamespace(real=True, method=METHODS.build("scaffold"))
    assert rule_of(PROBLEM, Settings()) == "bounded" and rule_of(scaffold, Settings()) == "mean"
    with pytest.raises(FedtailError, match="'bounded' does not work with method 'scaffold'"):
        check_aggregate(scaffold, Settings.of(server={"aggregate": "bounded"}))


@pytest.mark.parametrize("hostile", [[-50.0, 3.0, 0.0], [2.0, 9.0, 1.0]])
def test_influence_is_measured_on_updates_as_they_were_taken(hostile: list[float]) -> None:
    weights = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
    gathered = Gathered(PROBLEM, Settings(), updates(*HONEST, hostile), weights)
    told = gathered.influence(np.zeros(5, dtype=np.int64))
    taken = gathered.weights[:, None] * np.array([u.delta[0].double().numpy() for u in gathered.updates])
    for k, sent in enumerate([*HONEST, hostile]):
        others = taken.sum(0) - taken[k]
        cosine = float(np.dot(sent, others) / np.linalg.norm(sent) / np.linalg.norm(others))
        assert told["cosine"][k] == pytest.approx(cosine, abs=1e-3)


def test_an_update_is_flagged_by_its_distance_or_by_its_direction_alone() -> None:
    aside = Gathered(PROBLEM, Settings(), updates(*HONEST, [1.0, 0.0, 9.0]), np.full(5, 0.2))
    told = aside.influence(np.zeros(5, dtype=np.int64))
    assert told["flagged"] == [4] and told["cosine"][4] > 0 and told["distance"][4] > 3
    spread = [[1.0, 1.2, 0.0], [1.0, -1.2, 0.0], [1.0, 0.0, 1.2], [1.0, 0.0, -1.2], [-0.5, 0.0, 0.0]]
    told = Gathered(PROBLEM, Settings(), updates(*spread), np.full(5, 0.2)).influence(np.zeros(5, dtype=np.int64))
    assert told["flagged"] == [4] and told["cosine"][4] < -0.95 and told["distance"][4] < 3
