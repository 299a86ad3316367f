"""The round loop under a rate search."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedtail.core.candidates import binary_candidates
from fedtail.core.evidence import class_counts
from fedtail.core.metrics import summarize
from fedtail.core.movement import path_variation
from fedtail.core.records import Refusal, Task, Update
from fedtail.data import Federation
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES, FedHOO
from fedtail.rates.base import RateStrategy
from fedtail.rounds.evaluation import Split, confusion_on
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.search import RatesInForce
from fedtail.rounds.state import Problem
from fedtail.rounds.validation import over_sites, site_values
from fedtail.runs.build import assemble
from fedtail.settings import DataSettings, Settings
from fedtail.simulate import ReferenceSimulator
from tests.conftest import blob_federation


class Unreliable(ReferenceSimulator):
    """Client 2 fails in rounds 1 to 3."""

    def train(self, task: Task) -> tuple[list[Update], list[Refusal]]:
        updates, refusals = super().train(task)
        if task.round not in (1, 2, 3):
            return updates, refusals
        return [u for u in updates if u.client != 2], [*refusals, Refusal(2, task.round, "site is down")]


def problem(rates: RateStrategy, federation: Federation | None = None, method: str = "fedcgnm") -> Problem:
    federation = federation or blob_federation(3)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    settings = Settings.of(batch_size=16, path="reference")
    return assemble(federation, module, METHODS.build(method), rates, settings)


def history(p: Problem, rounds: int = 6, **plan: Any) -> list[dict[str, Any]]:
    return train_rounds(p, Settings.of(rounds=rounds, **{"lr": 0.05, **plan}), p.begin()).history


def test_a_search_goes_on_without_a_failed_client_and_says_so() -> None:
    p = problem(FedHOO(3, cold_rounds=1))
    old = p.engine
    p.engine = Unreliable(old.federation, old.model.module, p.method, old.settings)  # type: ignore[attr-defined]
    records = history(p, 6, quorum=0.5)
    assert [r["search"]["missing"] for r in records] == [[], [2], [2], [2], [], []]
    assert records[-1]["search"]["missing_rounds"] == 3
    kept = [r["rates"][2] for r in records]
    assert len(set(kept[:4])) == 1
    # Along the missing axis nothing was halved: rounds 1 to 3 make 4 children each, rounds 4 and 5 make 8.
    assert records[-1]["search"]["nodes"] == 1 + 3 * 4 + 2 * 8


def test_history_holds_the_path_variation_of_every_round() -> None:
    p = problem(FedHOO(3, cold_rounds=0))
    records = history(p, 7)
    weights = p.engine.sizes / p.engine.sizes.sum()
    expected = path_variation([r["rates"] for r in records], weights)
    np.testing.assert_allclose([r["path_variation"] for r in records], expected, atol=1e-12)
    np.testing.assert_allclose(
        [r["path_variation_per_root_round"] for r in records], expected / np.sqrt(np.arange(1, 8)), atol=1e-12
    )
    assert expected[-1] > 0


def test_path_variation_weighs_clients_by_their_share() -> None:
    now: Any = SimpleNamespace(searches="rate", rates=np.array([0.5, 0.5]))
    path, shares = RatesInForce([]), np.array([0.25, 0.75])
    assert path.record(now, shares, 0)["path_variation"] == 0.0
    now.rates = np.array([0.7, 0.5])
    assert path.record(now, shares, 1)["path_variation"] == pytest.approx(0.25 * 0.2)


@pytest.mark.parametrize(("searches", "low", "high"), [("lr", 0.01, 0.2), ("beta", 0.1, 0.9)])
def test_any_scalar_of_the_local_step_is_searched(searches: str, low: float, high: float) -> None:
    strategy = FedHOO(3, low, high, searches=searches, log=searches == "lr", base_rate=0.5, cold_rounds=0)
    p = problem(strategy)
    seen: list[Task] = []
    train = p.engine.train
    p.engine.train = lambda task: (seen.append(task), train(task))[1]  # type: ignore[method-assign]
    records = history(p, 3)
    assert all(r["rates"] == [0.5] * 3 for r in records)
    assert all(low < v < high for r in records for v in r["searched"][searches])
    for task in seen:
        assert set(task.probes) == {"rate", searches} and (task.probes["rate"] == 0.5).all()
    if searches == "lr":  # the search sets the schedule's first value; the schedule still decays it
        first, last = seen[0].probes["lr"], seen[-1].probes["lr"]
        assert first.min() >= low and last.max() < 0.01 * high


def test_a_quantity_the_method_does_not_have_is_refused() -> None:
    with pytest.raises(FedtailError, match=r"rates\.searches.*'beta' is unknown.*lr, rate, weight_decay"):
        history(problem(FedHOO(3, searches="beta"), method="fedavg"))


def test_partial_participation_is_refused_before_the_first_round() -> None:
    with pytest.raises(FedtailError, match="fedhoo_clusters"):
        history(problem(FedHOO(3)), participation=0.5)


def test_a_search_without_validation_data_is_refused() -> None:
    federation = blob_federation(3)
    bare = replace(federation, validation=tuple(np.empty(0, dtype=np.int64) for _ in range(3)))
    with pytest.raises(FedtailError, match=r"no validation data at the clients; set data\.validation"):
        history(problem(FedHOO(3), bare))


def test_a_server_holdout_replaces_the_clients_validation() -> None:
    federation = blob_federation(3)
    test = federation.validation[0]
    served = replace(federation, holdout=test, validation=tuple(np.empty(0, dtype=np.int64) for _ in range(3)))
    p = problem(FedHOO(3), served)
    records = history(p, 4, validate_every=0)
    assert all("reward" in r for r in records)
    alone = problem(FedHOO(3), replace(federation, validation=(test, test[:0], test[:0])))
    assert [r["reward"] for r in history(alone, 4)] == [r["reward"] for r in records]
    elsewhere = Settings(data=DataSettings(holdout=0.1))
    with pytest.raises(FedtailError, match=r"data\.holdout needs a server that has data"):
        train_rounds(problem(FedHOO(3)), elsewhere, problem(FedHOO(3)).begin())


def test_pooled_validation_equals_the_sum_over_clients() -> None:
    federation = blob_federation(4)
    p = problem(RATES.build("uniform", 4), federation)
    rng = np.random.default_rng(0)
    x = p.model.vector.clone()
    deltas = [x.new_tensor(rng.standard_normal((2, x.numel()))) for _ in range(3)]
    candidates = binary_candidates(x, np.full(3, 1 / 3), deltas, np.arange(3), 3)
    counts = p.engine.validate(candidates, [0, 1, 3])
    for s in range(8):
        expected = sum(
            class_counts(confusion_on(p.model, Split.of(c, c.validation))(candidates.model(s)))
            for c in map(federation.client, (0, 1, 3))
        )
        np.testing.assert_array_equal(counts[s], expected)


def test_the_metric_decides_which_candidate_wins() -> None:
    picked = set()
    for metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        records = history(problem(FedHOO(3, 0.0, 1.0)), 5, metric=metric)
        picked.add(tuple(round(r["reward"], 6) for r in records))
    assert len(picked) > 1


def test_every_round_samples_other_clients() -> None:
    records = history(problem(RATES.build("uniform", 8), blob_federation(8)), 12, participation=0.5)
    sampled = [tuple(r["clients"]) for r in records]
    assert all(len(s) == 4 for s in sampled) and len(set(sampled)) > 6 and set(sum(sampled, ())) == set(range(8))


def test_the_worst_client_of_a_round_has_the_lowest_value() -> None:
    assert over_sites({0: 0.5, 1: 0.2, 2: 0.9, 3: float("nan")}, "macro_f1")["client"] == 1
    assert over_sites({0: 0.5, 1: 0.2, 2: 0.9}, "log_loss")["client"] == 2
    for record in history(problem(RATES.build("uniform", 3)), 2):
        assert record["sites"]["worst"] <= record["sites"]["mean"]


@pytest.mark.parametrize(("shape", "metric"), [((3, 3), "macro_f1"), ((3, 3), "accuracy"), ((1, 2), "accuracy")])
def test_what_clients_are_compared_by_is_what_each_alone_would_be_told(shape: tuple[int, int], metric: str) -> None:
    rng = np.random.default_rng(0)
    parts = {k: np.cumsum(rng.integers(0, 4, shape), axis=1) for k in (2, 3, 7)} | {5: np.zeros(shape, dtype=np.int64)}
    expected = {k: summarize(m)[metric] for k, m in parts.items() if m.sum()}
    assert site_values(parts, metric) == pytest.approx(expected) and 5 not in expected
    assert site_values({}, metric) == {}
