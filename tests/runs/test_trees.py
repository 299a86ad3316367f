"""A run with trees has everything that a run with a network has."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedtail import Federation, fit, load_model, write_run_report
from fedtail.data import DATASETS, partition
from fedtail.errors import FedtailError
from fedtail.methods import Trees
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.runs.export import export_onnx
from fedtail.runs.judged import judge
from fedtail.runs.record import load_run


def crashes(n: int = 2500, seed: int = 0) -> pd.DataFrame:
    """Rows of three hospitals; severity depends on speed, on the kind of road and on the hospital."""
    rng = np.random.default_rng(seed)
    hospital = rng.choice(["east", "north", "west"], n, p=[0.5, 0.3, 0.2])
    speed, road = rng.normal(50, 20, n), rng.choice(["town", "country", "motorway"], n)
    score = speed / 20 + (road == "country") + 2.0 * (hospital == "west") + rng.logistic(size=n) * 0.6
    speed[rng.random(n) < 0.1] = np.nan
    severity = np.select([score > 5.5, score > 4], ["fatal", "serious"], "minor")
    return pd.DataFrame({"hospital": hospital, "speed": speed.round(1), "road": road, "severity": severity})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees") / "crashes.csv"
    crashes().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def federation(table: Path) -> Federation:
    return Federation.from_tables(table, label="severity", site="hospital")


def settings_of(table: Path, folder: Path, *more: str) -> Any:
    own = [f"data.path={table}", "data.label=severity", "data.site=hospital", f"run.folder={folder}"]
    named = {"data.name": "table", "method.name": "trees"}
    return load_config(None, [*own, "run.rounds=6", "run.name=a", *more], named, suggest=True)


def test_a_fit_finds_what_a_table_says_and_names_the_columns_that_said_it(federation: Federation) -> None:
    found = fit(federation, method="trees", rounds=15)
    assert found.test["macro_f1"] > 0.6 and found.before is not None
    assert {s["site"] for s in found.sites} == {"east", "north", "west"}
    assert next(iter(found.summary["importance"])) == "speed" and found.summary["importance"]["site"] > 0.1
    assert found.titles["method"] == "Trees"
    losses = [record["train_loss"] for record in found.history]
    assert all(after < before for before, after in pairwise(losses))


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(table: Path, tmp_path: Path) -> None:
    whole = run(settings_of(table, tmp_path / "whole"))
    run(settings_of(table, tmp_path / "half"), on_round=lambda state, record, seconds: state.round == 3)
    stopped = tmp_path / "half" / "a"
    assert len(load_run(stopped).history) == 3
    again = run(settings_of(table, tmp_path / "half"), resume=True)
    histories = [(tmp_path / name / "a" / "history.jsonl").read_text() for name in ("half", "whole")]
    assert histories[0] == histories[1]
    assert np.array_equal(again.x.numpy(), whole.x.numpy())


def test_a_saved_model_answers_as_the_run_did_and_knows_sites_by_their_column(table: Path, tmp_path: Path) -> None:
    found = run(settings_of(table, tmp_path))
    model = load_model(tmp_path / "a")
    rows = crashes(300, seed=1)
    p = model.predict_proba(rows)
    assert np.allclose(p.sum(1), 1, atol=1e-6)
    assert np.array_equal(p, found.model().predict_proba(rows))
    rows.to_csv(tmp_path / "new.csv", index=False)
    assert np.allclose(p, model.predict_proba(tmp_path / "new.csv"), atol=1e-6)
    unknown, west, east = rows.drop(columns="hospital"), rows.assign(hospital="west"), rows.assign(hospital="east")
    assert not np.allclose(p, model.predict_proba(unknown))
    assert np.array_equal(model.at("west").predict_proba(unknown), model.predict_proba(west))
    assert np.array_equal(model.predict_proba(unknown), model.predict_proba(rows.assign(hospital="south")))
    fatal = list(model.classes).index("fatal")
    assert model.predict_proba(west)[:, fatal].mean() > model.predict_proba(east)[:, fatal].mean()


def test_sites_leave_no_trace_in_the_model_where_they_are_not_to(federation: Federation) -> None:
    found = fit(federation, method=Trees(site=False), rounds=3)
    assert set(found.summary["importance"]) == {"speed", "road"}
    assert "sites" not in found.architecture


def test_arrays_and_built_in_tables_have_trees_too() -> None:
    digits = partition(DATASETS.build("digits"), clients=3)
    with pytest.raises(FedtailError, match="needs a table"):
        fit(digits, method="trees", rounds=1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    arrays = Federation.from_arrays([(x[k::3], (x[k::3, 0] > 0).astype(int)) for k in range(3)])
    assert fit(arrays, method="trees", rounds=10).test["accuracy"] > 0.9


def test_patience_and_the_best_round_follow_the_loss_on_private_validation(table: Path, tmp_path: Path) -> None:
    more = ("run.rounds=60", "run.select=best", "run.patience=4", "method.lr=0.5")
    found = run(settings_of(table, tmp_path, *more))
    losses = [record["validation"]["weighted_loss"] for record in found.history]
    lowest = 1 + int(np.argmin(losses))
    assert found.summary["rounds"] == lowest + 4 < 60
    assert lowest <= found.summary["selected_round"] <= found.summary["rounds"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("local.lr=0.3", "local.lr has no effect with method.name = 'trees'"),
        ("server.optimizer=adam", "server.optimizer has no effect with method.name = 'trees'"),
        ("model.name=mlp", "model.name = 'mlp' has no effect with method 'trees'"),
        ("privacy.mode=central", "adds noise to updates of networks"),
        ("rates.name=fedhoo", "searches resampling rates"),
        ("method.leaves=1", r"method.leaves = 1 is outside \[2, 256\]"),
        ("method.weight_decay=0.1", "method.weight_decay has no effect on trees"),
    ],
)
def test_what_is_for_networks_only_is_refused_in_one_line(table: Path, tmp_path: Path, option: str, said: str) -> None:
    with pytest.raises(FedtailError, match=said):
        run(settings_of(table, tmp_path, option))


def test_result_and_history_are_those_of_a_run(table: Path, tmp_path: Path) -> None:
    run(settings_of(table, tmp_path))
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["method"] == "trees" and result["engine"]["path"] == "trees"
    assert result["curves"]["test"]["pr"].keys() == {"fatal", "minor", "serious"}
    assert "Share of all gains" in write_run_report(tmp_path / "a").read_text()
    record = load_run(tmp_path / "a").history[-1]
    assert {"test", "validation", "sites", "train_loss", "rates"} <= record.keys()
    assert len(record["test"]["per_class_f1"]) == 3


def test_an_onnx_file_of_trees_answers_as_the_model_does(federation: Federation, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = fit(federation, method="trees", rounds=8).model()
    session = ort.InferenceSession(export_onnx(model, tmp_path / "trees.onnx"))
    rows = crashes(200, seed=9)
    rows.loc[:20, ["speed", "road", "hospital"]] = None
    p, answers = session.run(None, {"x": model.inputs(rows, []).numpy()})
    expected = model.predict_proba(rows)
    assert np.abs(p - expected).max() < 1e-6
    assert [model.classes[i] for i in answers] == model.answers(expected).tolist()
    ours, theirs = (judge(one, crashes(200, seed=9)) for one in (model, tmp_path / "trees.onnx"))
    assert np.abs(ours.p - theirs.p).max() < 1e-6, "the site's number goes with the rows"
