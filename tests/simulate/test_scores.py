"""Counts of probabilities are the same on every path of the simulator and at sites."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import fedtail as ft
from fedtail.core.candidates import binary_candidates, uniform_candidates
from fedtail.core.scores import Scores, average_precision, log_loss
from fedtail.core.totals import total
from fedtail.data import Federation
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rounds.evaluation import federation_split, model_logits
from fedtail.rounds.search import rewards_of
from fedtail.rounds.state import Problem
from fedtail.runs.build import assemble
from fedtail.settings import Settings


def problem_of(federation: Federation, path: str) -> Problem:
    module = build_model("mlp", federation.input_shape, federation.n_classes, seed=3, hidden=(8,))
    rates = RATES.build("uniform", federation.n_clients)
    return assemble(federation, module, METHODS.build("fedavg"), rates, Settings.of(path=path))


def scores(federation: Federation, path: str, split: str) -> dict[int, Scores]:
    problem = problem_of(federation, path)
    return dict(problem.engine.scores(problem.model.vector.clone(), split))


@pytest.mark.parametrize("split", ["test", "validation"])
@pytest.mark.parametrize("path", ["batched", "graph"])
def test_every_path_counts_the_same(federation: Federation, path: str, split: str) -> None:
    expected, found = scores(federation, "reference", split), scores(federation, path, split)
    assert list(expected) == list(found) == list(range(federation.n_clients))
    for k, one in expected.items():
        np.testing.assert_array_equal(one.confusion, found[k].confusion)
        np.testing.assert_allclose(one.sums, found[k].sums, rtol=1e-4)
        np.testing.assert_allclose(one.mass, found[k].mass, rtol=1e-4)
        for a, b in zip(one.bins, found[k].bins, strict=True):
            assert average_precision(a) == pytest.approx(average_precision(b), abs=0.01, nan_ok=True)


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_sites_add_up_to_the_federation(federation: Federation, path: str) -> None:
    problem = problem_of(federation, path)
    x = problem.model.vector.clone()
    for split, n in (("validation", sum(map(len, federation.validation))), ("test", len(federation.test))):
        whole = total(found for _, found in problem.engine.scores(x, split))
        assert whole is not None and whole.n == n
        np.testing.assert_array_equal(whole.confusion, problem.engine.confusion(x, split))
    each = problem.engine.confusions(x)
    assert [m.sum() for m in each.values()] == [len(v) for v in federation.validation]
    np.testing.assert_array_equal(sum(each.values()), problem.engine.confusion(x, "validation"))


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_candidates_are_scored_as_they_would_be_one_by_one(federation: Federation, path: str) -> None:
    problem = problem_of(federation, path)
    x = problem.model.vector.clone()
    moved = x.new_tensor(np.random.default_rng(0).normal(size=(3, len(x))))
    candidates = uniform_candidates(x, np.ones(1), [0.3 * moved])
    found = dict(problem.engine.validate_scores(candidates, range(federation.n_clients)))
    for s in range(3):
        alone = total(one for _, one in problem.engine.scores(candidates.model(s), "validation"))
        assert alone is not None and log_loss(found[s]) == pytest.approx(log_loss(alone), rel=1e-3)


@pytest.mark.parametrize("path", ["reference", "batched", "graph"])
def test_fedhoo_can_search_by_the_class_balanced_loss(federation: Federation, path: str) -> None:
    """What the search is told of each of its candidates, against cross-entropies of the plain module."""
    problem, settings = problem_of(federation, path), Settings.of(path=path, metric="balanced_loss")
    x, k = problem.model.vector.clone(), federation.n_clients
    moved = [x.new_tensor(np.random.default_rng(i).normal(size=(2, len(x)))) for i in range(k)]
    candidates = binary_candidates(x, np.full(k, 1 / k), moved, np.arange(k), k)
    told = rewards_of(problem, settings, candidates, np.arange(k))
    split = federation_split(federation, "validation")
    for s in (0, 5, 2**k - 1):
        batches = list(model_logits(problem.model, candidates.vector(s), split.batches()))
        losses = torch.cat([cross_entropy(z, y, reduction="none") for z, y in batches]).numpy()
        each = [losses[split.labels == c].mean() for c in np.unique(split.labels)]
        assert told[s] == pytest.approx(1 / (1 + np.mean(each)), rel=1e-4)


@pytest.mark.parametrize("metric", ["pr_auc", "log_loss"])
def test_a_run_can_choose_by_what_its_probabilities_are_worth(federation: Federation, metric: str) -> None:
    """The learning rate raced, the model kept and the worst site told, by a metric of scores."""
    result = ft.fit(federation, "mlp", "fedavg", 0.2, rounds=12, lr="auto", metric=metric, select="best", patience=4)
    values = [r["validation"][metric] for r in result.history]
    best = min(values) if metric == "log_loss" else max(values)
    assert result.history[0]["race"][0]["reward"] > 0
    if metric == "log_loss":  # no standard error is known of it, so the very best is kept
        assert values[result.summary["selected_round"] - 1] == best
        assert result.validation["log_loss"] == pytest.approx(best, rel=1e-6)
    assert result.summary["rounds"] <= 12
    for record in result.history:
        told = record["sites"]
        assert told["worst"] <= told["mean"] and told["n"] == federation.n_clients
        assert told["worst"] == record["validation"]["worst_site"]


def test_a_search_cannot_compare_candidates_by_single_sites_but_selection_can(federation: Federation) -> None:
    options = {"rounds": 3, "lr": 0.2, "metric": "worst_site", "select": "best"}
    kept = ft.fit(federation, "mlp", "fedavg", 0.2, **options)
    values = [r["validation"]["worst_site"] for r in kept.history]
    assert values[kept.summary["selected_round"] - 1] >= max(values) - 0.1
    with pytest.raises(ft.FedtailError, match="per-site results, which a search cannot use to compare"):
        ft.fit(federation, "mlp", "fedavg", "fedhoo", **options)
