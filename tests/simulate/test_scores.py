"""Counts of probabilities are the same on every path of the simulator and at sites."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtail.core.scores import Scores, average_precision
from fedtail.data import Federation
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.runs.decide import total
from fedtail.runs.problem import assemble
from fedtail.runs.result import site_results
from fedtail.settings import Settings


def scores(federation: Federation, path: str, split: str) -> dict[int, Scores]:
    module = build_model("mlp", federation.input_shape, federation.n_classes, seed=3, hidden=(8,))
    rates = RATES.build("uniform", federation.n_clients)
    problem = assemble(federation, module, METHODS.build("fedavg"), rates, Settings.of(path=path))
    return dict(problem.engine.scores(problem.model.vector.clone(), split))


@pytest.mark.parametrize("split", ["test", "validation"])
@pytest.mark.parametrize("path", ["batched", "graph"])
def test_every_path_counts_the_same(federation: Federation, path: str, split: str) -> None:
    expected, found = scores(federation, "reference", split), scores(federation, path, split)
    assert list(expected) == list(found) == ([-1] if split == "test" else list(range(federation.n_clients)))
    for k, one in expected.items():
        np.testing.assert_array_equal(one.confusion, found[k].confusion)
        np.testing.assert_allclose(one.sums, found[k].sums, rtol=1e-4)
        for a, b in zip(one.bins, found[k].bins, strict=True):
            assert average_precision(a) == pytest.approx(average_precision(b), abs=0.01, nan_ok=True)


def test_sites_add_up_to_the_federation_and_each_has_its_own_row(federation: Federation) -> None:
    parts = scores(federation, "reference", "validation")
    whole = total(parts)
    assert whole is not None and whole.n == sum(len(v) for v in federation.validation)
    module = build_model("mlp", federation.input_shape, federation.n_classes, seed=3, hidden=(8,))
    rates = RATES.build("uniform", federation.n_clients)
    problem = assemble(federation, module, METHODS.build("fedavg"), rates, Settings.of())
    rows = site_results(problem, torch.as_tensor(problem.model.vector), federation.sites, {})
    assert [row["site"] for row in rows] == list(federation.sites)
    assert all("macro_f1" in row["validation"] and "pr_auc" in row["validation"] for row in rows)
