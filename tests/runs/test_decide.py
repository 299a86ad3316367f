"""Decisions are chosen after training, kept with the model, and used when it predicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtail as ft
from fedtail.data import Federation
from fedtail.runs.record import promises
from tests.conftest import blob_federation

OPTIONS = {"rates": 0.2, "rounds": 4, "lr": 0.2}


@pytest.fixture
def wide() -> Federation:
    """With overlapping classes and enough validation samples to choose by."""
    return blob_federation(n_max=200, spread=3.0)


def test_calibration_changes_probabilities_and_not_the_training(wide: Federation) -> None:
    plain = ft.fit(wide, "mlp", "fedavg", **OPTIONS)
    calibrated = ft.fit(wide, "mlp", "fedavg", decision={"calibrate": "temperature"}, **OPTIONS)
    assert torch.equal(plain.x, calibrated.x) and calibrated.decision.temperature != 1.0
    assert calibrated.before is not None and plain.before is None
    assert calibrated.before["log_loss"] == pytest.approx(plain.test["log_loss"])
    assert calibrated.test["macro_f1"] == plain.test["macro_f1"]


def test_a_class_that_must_be_found_is_found_and_the_model_remembers(wide: Federation, tmp_path: Path) -> None:
    rare = wide.classes[-1]
    goal = {"goal": "recall", "find": rare, "recall": 0.9}
    result = ft.fit(wide, "mlp", "fedavg", decision=goal, **OPTIONS)
    assert result.before is not None
    assert result.test["per_class_accuracy"][-1] >= result.before["per_class_accuracy"][-1]
    rows = wide.test.x.numpy()
    loaded = ft.load_model(result.save(tmp_path / "x"))
    assert loaded.decision == result.decision
    called = (loaded.predict(rows) == rare).sum()
    assert called == result.confusion[:, -1].sum()
    np.testing.assert_array_equal(loaded.predict(rows), result.model().predict(rows))


def test_a_recall_that_silences_a_rarer_class_is_the_verdict_of_the_run(wide: Federation) -> None:
    goal = {"goal": "recall", "find": wide.classes[1], "recall": 0.9}
    result = ft.fit(wide, "mlp", "fedavg", decision=goal, **OPTIONS)
    assert result.before is not None and result.verdict is not None and result.verdict.kind == "silenced"
    found = [np.asarray(test["per_class_accuracy"]) for test in (result.before, result.test)]
    lost = np.flatnonzero((found[0] > 0) & (found[1] == 0))
    assert lost.size and all(repr(wide.classes[c]) in result.verdict.said for c in lost)
    assert result.verdict.said in repr(result)


@pytest.mark.parametrize("scope", ["global", "site"])
def test_a_recall_without_a_validation_case_calls_nothing_by_it_and_is_the_verdict(
    wide: Federation, scope: str
) -> None:
    rare, y = wide.classes[-1], wide.pool.y.numpy()
    none = replace(wide, validation=tuple(rows[y[rows] != len(wide.classes) - 1] for rows in wide.validation))
    goal = {"goal": "recall", "find": rare, "scope": scope}
    result = ft.fit(none, "mlp", "fedavg", decision=goal, **OPTIONS)
    assert result.decision.target is None and result.confusion[:-1, -1].sum() < 0.5 * result.confusion[:-1].sum()
    assert result.verdict is not None and result.verdict.kind == "unpromised"
    assert f"no validation sample is of {rare!r}" in result.verdict.line() and "validation=0.3" in result.verdict.line()


def test_each_site_decides_for_itself_and_the_model_remembers(wide: Federation, tmp_path: Path) -> None:
    goal = {"calibrate": "vector", "goal": "macro_f1", "scope": "site"}
    result = ft.fit(wide, "mlp", "fedavg", decision=goal, **OPTIONS)
    assert set(result.site_decisions) == set(wide.sites) and len(set(result.site_decisions.values())) > 1
    assert result.before is not None
    for metric, sign in (("log_loss", -1), ("macro_f1", 1)):
        after, before = (
            np.mean([row[metric] for row in rows])
            for rows in ([r["validation"] for r in result.sites], [r["before"]["validation"] for r in result.sites])
        )
        assert sign * (after - before) > 0.02, metric
    assert all("decision" in row for row in result.sites) and "before" in result.worst
    loaded = ft.load_model(result.save(tmp_path / "x"))
    rows, owner = wide.test.x.numpy(), wide.test_clients
    answers = np.empty(len(rows), dtype=object)
    for k, site in enumerate(wide.sites):
        answers[owner == k] = loaded.at(site).predict(rows[owner == k])
    truth = np.array(wide.classes)[wide.test.y.numpy()]
    assert (answers == truth).sum() == np.trace(result.confusion)
    with pytest.raises(ft.FedtailError, match="site 'nowhere' is unknown"):
        loaded.at("nowhere")
    with pytest.raises(ft.FedtailError, match=r"train with decision\.scope = 'site'"):
        ft.load_model(ft.fit(wide, "mlp", "fedavg", rates=0.2, rounds=1).save(tmp_path / "y")).at(wide.sites[0])


def test_classes_that_will_be_met_equally_often_are_found_equally_well(tmp_path: Path) -> None:
    skewed = blob_federation(n_max=400, spread=3.0)
    plain = ft.fit(skewed, "mlp", "fedavg", **OPTIONS)
    goal = {"calibrate": "vector", "goal": "balanced_accuracy"}
    result = ft.fit(skewed, "mlp", "fedavg", decision=goal, **OPTIONS)
    assert torch.equal(plain.x, result.x)
    assert result.test["balanced_accuracy"] > plain.test["balanced_accuracy"] + 0.02
    loaded = ft.load_model(result.save(tmp_path / "x"))
    np.testing.assert_array_equal(loaded.predict(skewed.test.x.numpy()), result.model().predict(skewed.test.x.numpy()))


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        ({"goal": "recall"}, "needs decision.find, one of"),
        ({"goal": "recall", "find": "nobody"}, "decision.find 'nobody' is unknown"),
        ({"goal": "cost"}, "needs decision.costs, 5 rows of 5 numbers"),
        ({"goal": "reccall"}, "did you mean 'recall'"),
        ({"recall": 1.5}, r"decision.recall = 1.5 is outside \(0, 1\)"),
        ("recall", "config section 'decision' must be a table, got 'recall'"),
    ],
)
def test_what_cannot_be_decided_is_one_line_before_the_first_round(
    wide: Federation, decision: object, words: str
) -> None:
    rounds: list[object] = []
    with pytest.raises(ft.FedtailError, match=words):
        ft.fit(wide, "mlp", "fedavg", decision=decision, on_round=lambda *a: rounds.append(a), **OPTIONS)
    assert not rounds


def test_a_run_says_what_it_promises_and_what_an_answer_costs_at_most(wide: Federation, tmp_path: Path) -> None:
    name = wide.classes[-1]
    goal = {"goal": "recall", "find": name, "recall": 0.6, "confidence": 0.8}
    record = ft.fit(wide, "mlp", rounds=3, lr=0.3, decision=goal).record()
    assert any("confidence" in said or "would be needed" in said for said in promises(record))
    costs = [[0.0 if i == j else 1.0 for j in range(len(wide.classes))] for i in range(len(wide.classes))]
    result = ft.fit(wide, "mlp", rounds=3, lr=0.3, decision={"goal": "cost", "costs": costs})
    cost = result.summary["cost"]
    assert 0 < cost["mean"] < cost["bound"] <= 1 and cost["confidence"] == 0.9
    assert promises(result.record())[0].startswith(f"an answer costs {cost['mean']:.3g} on average, at most ")
    page = result.save(tmp_path / "r") and result.report()
    assert "an answer costs" in page.read_text().lower()
