"""``FederatedClassifier`` and ``fit(X, y)``: what scikit-learn and pandas users expect."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedtail as ft
from fedtail.errors import FedtailError
from fedtail.runs.judged import judge

QUICK = {"rounds": 12, "lr": 0.3}


def rows(n: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels of which one in eight is 1, and sites."""
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.125).astype(int)
    return rng.normal(size=(n, 4)) + 2.0 * y[:, None], y, rng.choice(["north", "south"], n)


X, Y, SITES = rows()


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([ft.FederatedClassifier(rounds=20, lr=0.3)])
def test_it_passes_scikit_learns_own_checks(estimator, check) -> None:
    check(estimator)


@pytest.mark.slow
def test_it_passes_the_check_that_scipy_must_be_told_of_before_it_is_imported() -> None:
    check = (
        "import fedtail as ft\n"
        "from sklearn.utils.estimator_checks import check_array_api_input as check\n"
        "name = 'FederatedClassifier'\n"
        "check(name, ft.FederatedClassifier(rounds=20, lr=0.3), 'numpy', expect_only_array_outputs=False)\n"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", check], env={**os.environ, "SCIPY_ARRAY_API": "1"}, check=True
    )


@pytest.mark.parametrize("of", [int, float, bool, lambda y: np.where(y, "ill", "well"), lambda y: y + 0.5])
def test_answers_have_the_type_of_the_labels(of, tmp_path: Path) -> None:
    labels = of(Y) if not isinstance(of, type) else Y.astype(of)
    result = ft.fit(X, labels, sites=SITES, **QUICK)
    loaded = ft.load_model(result.save(tmp_path / "run"))
    for answers in (result.predict(X), loaded.predict(X), loaded.predict(pd.DataFrame(X, columns=list("0123")))):
        assert (answers == labels).mean() > 0.93 and set(answers) == set(labels)
    assert np.array_equal(result.predict_proba(X[:5]), loaded.predict_proba(X[:5]))
    assert result.predict(X).dtype.kind == np.asarray(labels).dtype.kind or labels.dtype.kind == "U"
    with pytest.raises(FedtailError, match="already contains a run"):
        result.save(tmp_path / "run")


@pytest.mark.parametrize("names", [(" ill", "well "), ("TRUE", "False")])
def test_names_that_python_gives_are_answered_as_they_are_and_read_from_a_file(names, tmp_path: Path) -> None:
    labels = np.where(Y, *names)
    model = ft.fit(X, labels, sites=SITES, **QUICK).model()
    assert (model.predict(X) == labels).mean() > 0.93 and set(model.classes) == set(names)
    pd.DataFrame(X, columns=list("0123")).assign(label=labels).to_csv(tmp_path / "t.csv", index=False)
    assert judge(model, tmp_path / "t.csv", label="label").scores.confusion.trace() > 0.93 * len(X)


def test_sites_may_be_the_column_of_a_frame_and_rows_that_lack_columns_are_told_the_tables(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("abcd")).assign(word=np.where(X[:, 0] > 0, "high", "low"), town=SITES)
    named, given = (ft.fit(f, Y, sites=s, **QUICK) for f, s in ((frame, "town"), (frame.drop(columns="town"), SITES)))
    assert named.about.sites == ("north", "south") and np.array_equal(named.x, given.x)
    with pytest.raises(FedtailError, match="no site column 'twon'; did you mean 'town'"):
        ft.fit(frame, Y, sites="twon")
    with pytest.raises(FedtailError, match=r"\(5, 2\) have neither the table's columns \(a, b, c, d, word\) nor its"):
        named.predict(X[:5, :2])


def test_whole_numbers_in_a_file_are_answered_as_pandas_reads_them(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("abcd")).assign(label=Y, site=SITES)
    frame.to_csv(tmp_path / "t.csv", index=False)
    result = ft.fit(ft.Federation.from_tables(tmp_path / "t.csv", "label", "site"), **QUICK)
    assert (result.predict(tmp_path / "t.csv") == pd.read_csv(tmp_path / "t.csv")["label"]).mean() > 0.93
    named = ft.Federation.from_tables(frame.assign(label=Y.astype(str)), "label", "site")
    assert set(ft.fit(named, **QUICK).predict(frame)) == {"0", "1"}


def test_arrays_of_clients_have_the_defaults_of_tables_and_answer_with_their_labels() -> None:
    pairs = [(X[here], Y[here] + 3) for here in (SITES == "north", SITES == "south")]
    result = ft.fit(ft.Federation.from_arrays(pairs), rounds=12)
    assert result.settings.method.name == "trees" and result.settings.run.metric == "macro_f1"
    assert (result.predict(X) == Y + 3).mean() > 0.93
    data = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    assert ft.fit(ft.Federation.from_datasets([data]), **QUICK).predict(X).dtype == np.int64


def test_rows_without_sites_are_one_sites_and_images_need_no_table() -> None:
    assert ft.Federation.from_rows(X, Y).n_clients == 1
    assert ft.Federation.from_rows(X, Y, SITES).sites == ("north", "south")
    images = ft.Federation.from_rows(np.zeros((40, 1, 8, 8)), np.arange(40) % 2, np.arange(40) // 20)
    assert images.input_shape == (1, 8, 8) and images.sites == ("0", "1")


@pytest.mark.parametrize("gone", [None, np.nan])
def test_rows_that_name_no_site_make_up_none(gone: float | None) -> None:
    sites = np.where(np.arange(len(Y)) % 5 > 0, SITES.astype(object), gone)
    assert ft.Federation.from_rows(X, Y, sites).sites == ("north", "south")
    with pytest.raises(FedtailError, match="sites: 8 of 40 samples have none; leave them out"):
        ft.Federation.from_rows(np.zeros((40, 1, 8, 8)), np.arange(40) % 2, sites[:40])


def test_trees_train_with_the_defaults_and_know_the_site_of_new_rows() -> None:
    other = np.where(SITES == "north", Y, 1 - Y)  # which the site alone turns round
    frame = pd.DataFrame(X).assign(hospital=SITES).rename(columns=str)
    estimator = ft.FederatedClassifier(method="trees", rounds=15, site="hospital")
    assert cross_val_score(estimator, frame, other, cv=3).mean() > 0.9


def test_a_table_with_a_column_of_sites_goes_through_cross_validation() -> None:
    frame = pd.DataFrame(X, columns=list("abcd")).assign(ward=np.where(X[:, 0] > 0, "x", "y"), hospital=SITES)
    frame.loc[::9, "b"] = np.nan
    estimator = ft.FederatedClassifier(site="hospital", **QUICK)
    assert cross_val_score(estimator, frame, Y, cv=3, scoring="balanced_accuracy").mean() > 0.85
    fitted = estimator.fit(frame, Y)
    assert fitted.result_.about.sites == ("north", "south") and list(fitted.feature_names_in_) == list(frame)
    assert "hospital" not in str(fitted.result_.about.preprocessing["columns"])
    with pytest.raises(ValueError, match="X has no column 'hospital', which site names"):
        ft.FederatedClassifier(site="hospital").fit(frame.drop(columns="hospital"), Y)


@pytest.mark.parametrize("labels", [(False, True), ("nan", " a"), (10, 9), ("true", "TRUE")])
def test_labels_may_be_anything(labels: tuple) -> None:
    y = np.array(labels)[Y]
    fitted = ft.FederatedClassifier(rounds=4, lr=0.3).fit(X, y, sites=SITES)
    assert set(fitted.predict(X)) <= set(labels) and (fitted.predict(X) == y).mean() > 0.8
    assert fitted.result_.about.classes == tuple(str(label) for label in sorted(labels))
    assert np.argmax(fitted.predict_proba(X).mean(0)) == sorted(labels).index(labels[0])


def test_sites_may_go_along_as_an_argument() -> None:
    estimator = ft.FederatedClassifier(**QUICK)
    assert cross_val_score(estimator, X, Y, cv=3, params={"sites": SITES}).mean() > 0.9
    assert estimator.fit(X, Y, sites=SITES).result_.about.sites == ("north", "south")


def test_it_is_a_step_of_a_pipeline_and_can_be_calibrated() -> None:
    pipeline = make_pipeline(ColumnTransformer([("all", StandardScaler(), [0, 1, 2, 3])]), PCA(3),
                             ft.FederatedClassifier(**QUICK))  # fmt: skip
    assert pipeline.fit(X, Y).score(X, Y) > 0.93
    calibrated = CalibratedClassifierCV(ft.FederatedClassifier(**QUICK), cv=3).fit(X, Y)
    probabilities = calibrated.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert abs(probabilities[:, 1].mean() - Y.mean()) < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ft.fit(X), r"fit\(\) got a ndarray, not a Federation; pass fit\(X, y, sites=...\)"),
        (lambda: ft.fit(X, "mlp"), r"pass fit\(X, y, sites=...\)"),
        (lambda: ft.fit(X, Y[:-1]), r"y has shape \(399,\), but there are 400 rows"),
        (lambda: ft.fit(X, Y, sites=SITES[:3]), r"sites has shape \(3,\), but there are 400 rows"),
        (lambda: ft.fit(ft.Federation.from_rows(X, Y), sites=SITES), "a federation has its own"),
    ],
)
def test_what_does_not_fit_is_one_line(call, message: str) -> None:
    with pytest.raises(FedtailError, match=message):
        call()


def test_the_package_shows_what_it_offers_and_nothing_else() -> None:
    assert dir(ft) == sorted([*ft.__all__, "__version__"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(ft, name) is not None for name in dir(ft))
