from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedtail.data import DATASETS
from fedtail.data.partitions import partition
from fedtail.errors import FedtailError
from fedtail.rates import ClusteredFedHOO, Setting
from fedtail.rates.clusters import k_means, merge_small, sketch
from fedtail.runs.execution import fit
from tests.rates.test_fedhoo import candidate_rates

K = 20
TRUTH = np.arange(K) % 3


def updates(clients: np.ndarray, t: int = 0, size: int = 1000) -> list[torch.Tensor]:
    """Three kinds of clients, whose updates point three ways, with as much noise as signal."""
    ways = np.random.default_rng(0).standard_normal((3, size))
    rng = np.random.default_rng(t + 1)
    return [torch.as_tensor(ways[TRUTH[k]] + rng.standard_normal((2, size))) for k in clients]


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


def played(strategy: ClusteredFedHOO, best: np.ndarray, rounds: int, share: float = 1.0) -> None:
    """Rounds of a synthetic federation: client k is best at ``best[k]``, all count alike."""
    strategy.begin(Setting(rounds, share, np.full(K, 10)))
    for t in range(rounds):
        if strategy.done:
            return
        rng = np.random.default_rng((7, t))
        present = np.sort(rng.choice(K, round(share * K), replace=False))
        strategy.observe(present, updates(present, t))
        probes = strategy.ask()
        bits = (np.arange(2**strategy.n_axes)[:, None] >> strategy.axes[present]) & 1
        rates = np.where(bits == 1, probes[present, 1], probes[present, 0])
        weights = strategy.weights(np.full(K, 1 / K), present)
        strategy.tell(1 - (rates - best[present]) ** 2 @ weights, present=np.isin(np.arange(K), present))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_clusters_by_updates_find_the_kinds_of_clients_and_their_rates(share: float) -> None:
    best = np.array([0.45, 0.6, 0.75])[TRUTH]
    strategy = ClusteredFedHOO(K, clusters=3, max_rounds=60)
    played(strategy, best, 60, share)
    seen = strategy._seen
    assert seen.sum() >= K - 2 and same_partition(strategy.axes[seen], TRUTH[seen])
    assert np.abs(strategy.rates - best)[seen].max() < 0.05


def test_clusters_by_size_separate_small_from_large() -> None:
    strategy = ClusteredFedHOO(6, clusters=2, by="size")
    strategy.begin(Setting(10, 0.5, np.array([10, 1000, 12, 900, 9, 1100])))
    np.testing.assert_array_equal(strategy.axes, [0, 1, 0, 1, 0, 1])
    assert strategy.ask().shape == (6, 2) and len(strategy.axes) == 6


def test_a_cluster_with_too_few_clients_joins_the_nearest() -> None:
    points = np.array([[0.0], [0.1], [1.0], [5.0], [5.2]])
    labels = np.array([0, 0, 1, 2, 2])
    assert merge_small(labels, points, 2).tolist() == [0, 0, 0, 1, 1]
    assert merge_small(labels, points, 1).tolist() == labels.tolist()


def test_equal_sizes_make_one_cluster() -> None:
    strategy = ClusteredFedHOO(6, clusters=3, by="size")
    strategy.begin(Setting(10, 0.5, np.full(6, 100)))
    assert strategy.n_axes == 1


def test_given_groups_are_the_clusters_from_options_or_from_the_data() -> None:
    labels = ["north", "south", "north", "east"]
    given = ClusteredFedHOO(4, labels=labels)
    named = ClusteredFedHOO(4, by="labels")
    named.begin(Setting(10, 1.0, np.ones(4), tuple(labels)))
    for strategy in (given, named):
        np.testing.assert_array_equal(strategy.axes, [1, 2, 1, 0])
        assert strategy.n_axes == 3
        strategy.tell(np.zeros(8))
    with pytest.raises(FedtailError, match="needs a label per client"):
        ClusteredFedHOO(4, by="labels").begin(Setting(10, 1.0, np.ones(4)))


def test_a_missing_client_is_stood_in_for_by_its_cluster() -> None:
    strategy = ClusteredFedHOO(4, labels=[0, 0, 1, 1])
    p = np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(strategy.weights(p, np.array([1, 2, 3])), [0.3, 0.3, 0.4])
    np.testing.assert_allclose(strategy.weights(p, np.arange(4)), p)
    np.testing.assert_allclose(strategy.weights(p, np.array([2, 3])), [3 / 7, 4 / 7])


def test_a_cluster_wholly_absent_keeps_its_interval_and_rate() -> None:
    strategy = ClusteredFedHOO(4, labels=[0, 0, 1, 1], cold_rounds=0)
    strategy.tell([0.1, 0.2, 0.3, 0.4])
    probes, rates = strategy.ask(), strategy.rates
    strategy.tell([0.5, 0.6, 0.5, 0.6], present=np.array([True, False, False, False]))
    np.testing.assert_array_equal(strategy.ask()[2:], probes[2:])
    np.testing.assert_array_equal(strategy.rates[2:], rates[2:])
    assert (np.ptp(strategy.ask()[:2], axis=1) < np.ptp(probes[:2], axis=1)).all()
    assert strategy.stats()["missing"] == [1]


def test_a_hundred_clients_need_only_the_candidates_of_their_clusters() -> None:
    strategy = ClusteredFedHOO(100, clusters=5, by="size")
    strategy.begin(Setting(10, 0.1, np.arange(1, 101)))
    assert strategy.tell(np.arange(32.0)) == 31
    assert strategy.ask().shape == (100, 2)


def test_state_survives_json_while_clients_are_still_unknown() -> None:
    best = np.full(K, 0.6)
    one, two = ClusteredFedHOO(K, clusters=3), ClusteredFedHOO(K, clusters=3)
    played(one, best, 5, 0.2)
    assert not one._seen.all()
    two.load_state(json.loads(json.dumps(one.state())))
    played(one, best, 6, 0.2)
    played(two, best, 6, 0.2)
    assert one.state() == two.state()


def test_sketches_keep_cosines() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5000))
    for mix in (0.0, 0.5, 1.0):
        c = mix * a + (1 - mix) * b
        true = a @ c / np.linalg.norm(a) / np.linalg.norm(c)
        assert abs(sketch(torch.as_tensor(a), 0) @ sketch(torch.as_tensor(c), 0) - true) < 0.2


def test_k_means_separates_clear_clusters_and_numbers_them_by_appearance() -> None:
    points = np.array([[0.0], [5.0], [0.1], [5.1], [9.0]])
    np.testing.assert_array_equal(k_means(points, 3), [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(k_means(np.zeros((4, 2)), 3), np.zeros(4))


def test_too_many_groups_are_refused() -> None:
    with pytest.raises(FedtailError, match="13 different labels"):
        ClusteredFedHOO(13, labels=list(range(13)))


def test_two_groups_reach_the_golden_rates() -> None:
    """With one client per cluster it is FedHOO."""
    strategy = ClusteredFedHOO(2, labels=["a", "b"])
    while not strategy.done:
        rates = candidate_rates(strategy.ask())
        strategy.tell(1 - ((rates - np.array([0.47, 0.63])) ** 2).sum(axis=1))
    np.testing.assert_allclose(strategy.rates, [0.471875, 0.628125])


def test_a_column_of_a_table_names_the_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.standard_normal(120), "site": np.arange(120) % 6, "y": np.arange(120) // 6 % 2})
    frame["region"] = np.where(frame["site"] < 4, "north", "south")
    frame.to_csv(tmp_path / "t.csv", index=False)
    pooled = DATASETS.build("table", path=str(tmp_path / "t.csv"), label="y", site="site", cluster="region")
    federation = partition(pooled, validation=0.2)
    assert federation.clusters == ("north",) * 4 + ("south",) * 2
    strategy = ClusteredFedHOO(6, by="labels")
    result = fit(federation, "mlp", "fedavg", strategy, rounds=2)
    assert strategy.n_axes == 2 and result.history[-1]["search"]["clusters"] == [0, 0, 0, 0, 1, 1]
