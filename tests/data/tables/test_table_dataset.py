"""The data set ``table``: from a user's file to samples, with every repair stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedtail.data import DATASETS, partition, table_from_frame
from fedtail.data.registry import Pooled
from fedtail.data.tables.labels import class_places
from fedtail.errors import FedtailError
from fedtail.runs.saved import SavedModel


def crashes(n: int = 600, seed: int = 0) -> pd.DataFrame:
    """A small table with all that a real one has."""
    rng = np.random.default_rng(seed)
    severity = rng.choice(["minor", "serious", "fatal"], size=n, p=[0.85, 0.12, 0.03])
    speed = rng.normal(60, 15, size=n) + 12 * (severity == "fatal")
    return pd.DataFrame(
        {
            "case": np.arange(n),
            "when": pd.date_range("2020-01-01", periods=n).astype(str),
            "state": rng.choice(["NY", "TX", "CA"], size=n),
            "speed": np.where(rng.random(n) < 0.1, np.nan, speed.round(1)),
            "road": rng.choice(["rural", "urban", None], size=n),
            "part": [f"p{i}" for i in rng.integers(0, 100, size=n)],
            "note": [f"the driver of car {i} did not see the {i % 7} th sign" for i in range(n)],
            "severity": severity,
        }
    )


def load(path: Path, **options: Any) -> Pooled:
    return DATASETS.build("table", path=str(path), **{"label": "severity", **options})


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "crashes.csv"
    crashes().to_csv(path, index=False)
    return path


def test_a_csv_becomes_samples_sites_and_a_description(csv: Path) -> None:
    pool = load(csv, site="state")
    assert pool.name == "crashes" and pool.model == "auto"
    assert pool.classes == ("fatal", "minor", "serious")
    assert pool.sites is not None and set(pool.sites) == {"CA", "NY", "TX"} and len(pool.sites) == len(pool.train)
    assert len(pool.train) + len(pool.test) == 600
    columns = {c["name"]: c["kind"] for c in pool.preprocessing["columns"]}
    assert columns == {"speed": "numeric", "road": "category", "part": "hashed"}
    assert pool.train.x.shape[1] == 2 + 16 + 3 + 64 == pool.test.x.shape[1]
    text = " | ".join(pool.notes)
    assert "600 rows; 85 features from 1 numeric, 1 category, 1 hashed columns" in text
    assert "'case' (an ID" in text and "'when' (dates)" in text and "'note' (free text)" in text
    assert "'part' (100 levels)" in text


def test_the_test_split_is_stratified_and_scaling_is_fitted_on_training_rows_only(csv: Path) -> None:
    pool = load(csv, site="state", test_fraction=0.25, pieces=0)
    shares = pool.test.counts(3) / (pool.test.counts(3) + pool.train.counts(3))
    assert np.allclose(shares, 0.25, atol=0.06)
    speed, missing = pool.train.x[:, 0].double(), pool.train.x[:, 1]
    assert float(missing.sum()) > 0
    known = speed[missing == 0]
    assert abs(float(known.mean())) < 1e-6 and abs(float(known.std(unbiased=False)) - 1) < 1e-6
    assert abs(float(pool.test.x[:, 0].mean())) > 1e-6


def test_levels_of_test_rows_alone_do_not_enter_the_schema() -> None:
    frame = crashes(200)
    frame["road"] = "rural"
    frame.loc[frame.index[::2], "road"] = "urban"
    test = frame.iloc[:50].assign(road="moon")
    pool = table_from_frame(frame, "severity", test=test, exclude=["part"])
    assert [c["levels"] for c in pool.preprocessing["columns"] if c["name"] == "road"] == [["rural", "urban"]]
    assert any("test table" in n and "'moon'" in n for n in pool.notes)


def test_the_same_seed_gives_the_same_split_and_another_another(csv: Path) -> None:
    first, second, other = (load(csv, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.train.x, second.train.x) and not torch.equal(first.train.x, other.train.x)


def test_a_frame_is_not_changed() -> None:
    frame = crashes(100)
    before = frame.copy()
    table_from_frame(frame, "severity", "state")
    pd.testing.assert_frame_equal(frame, before)


def test_options_decide_what_is_used(csv: Path) -> None:
    pool = load(csv, exclude=["part", "road"], categories="case")
    assert [c["name"] for c in pool.preprocessing["columns"]] == ["case", "state", "speed"]
    assert next(c for c in pool.preprocessing["columns"] if c["name"] == "case")["kind"] == "hashed"
    assert load(csv, max_levels=100).preprocessing["columns"][-1]["kind"] == "category"


def test_a_column_that_gives_the_label_away_is_warned_about() -> None:
    frame = crashes(2000)
    frame["code"] = frame["severity"].map({"minor": 1, "serious": 2, "fatal": 3})
    frame["funeral"] = np.where(frame["severity"] == "fatal", "yes", None)
    pool = table_from_frame(frame, "severity", "state")
    warned = [n for n in pool.notes if "alone reveals" in n]
    assert len(warned) == 2
    assert "'code' alone reveals the severity" in warned[0] and """'data.exclude=["code"]'""" in warned[0]
    assert "'funeral' alone reveals severity = fatal" in warned[1]


def test_rows_without_label_or_site_are_left_out_and_counted() -> None:
    frame = crashes(300)
    frame.loc[:9, "severity"] = None
    frame.loc[5:14, "state"] = None
    pool = table_from_frame(frame, "severity", "state")
    assert len(pool.train) + len(pool.test) == 285
    assert "10 of 300 rows left out: no severity" in pool.notes and "10 of 300 rows left out: no state" in pool.notes


def test_a_site_column_without_values_is_named() -> None:
    with pytest.raises(FedtailError, match="site column 'state' is empty"):
        table_from_frame(crashes(100).assign(state=None), "severity", "state")


def test_whole_labels_are_the_same_with_and_without_a_point_in_training_test_and_sites() -> None:
    """A program that writes whole numbers beside gaps writes 7.0, and 7 where there is no gap."""
    frame = crashes(300)
    whole = frame["severity"].map({"minor": "0", "serious": "2", "fatal": "7"})
    pool = table_from_frame(
        frame.assign(severity=whole + ".0", state="1997.0"), "severity", "state", test=frame.assign(severity=whole)
    )
    assert pool.classes == ("0", "2", "7") and set(pool.sites) == {"1997"}  # type: ignore[arg-type]
    assert pool.test.y.tolist() == whole.map({"0": 0, "2": 1, "7": 2}).tolist()
    assert class_places(["7", "7.0", "2.5", "x"], ["2.5", "7.0"]) == [1, 1, 0, -1]
    halves = (whole + ".0").where(whole != "7", "2.5")  # which is no whole number, so all stay as they are written
    assert table_from_frame(frame.assign(severity=halves), "severity").classes == ("0.0", "2.0", "2.5")


def test_fractions_and_dates_in_number_are_no_classes_unless_declared() -> None:
    frame, rng = crashes(300), np.random.default_rng(0)
    shares = [f"{v:.2f}" for v in rng.integers(0, 30, 300) / 8]
    with pytest.raises(FedtailError, match=r"'severity' holds 30 different numbers with fractions \(0.00, 0.12, 0.25"):
        table_from_frame(frame.assign(severity=shares), "severity")
    days = pd.to_datetime("2024-01-01") + pd.to_timedelta(rng.integers(0, 30, 300), "D")
    with pytest.raises(FedtailError, match=r"holds 30 different dates .* bin it first"):
        table_from_frame(frame.assign(severity=days.strftime("%Y-%m-%d")), "severity")
    declared = table_from_frame(frame.assign(severity=shares), "severity", classes=sorted(set(shares)))
    assert len(declared.classes) == 30
    few = table_from_frame(frame.assign(severity=rng.choice(["0.5", "1.5"], 300)), "severity")
    assert few.classes == ("0.5", "1.5")


def test_classes_that_differ_in_capitals_only_are_warned_of() -> None:
    frame = crashes(300)
    frame.loc[::2, "severity"] = frame["severity"].str.upper()
    warned = [n for n in table_from_frame(frame, "severity").notes if "capitals" in n]
    assert len(warned) == 3 and "'MINOR', 'minor' of 'severity' differ only in capitals" in " ".join(warned)


def test_a_level_that_reads_as_missing_is_counted_as_such_in_the_note() -> None:
    frame = crashes(300).assign(airbag=np.where(np.arange(300) % 3, "deployed", "none"))
    assert "'airbag' (1 level and missing)" in " ".join(table_from_frame(frame, "severity").notes)


def test_every_site_keeps_a_training_row() -> None:
    frame = crashes(400)
    frame.loc[:29, "state"] = [f"tiny {i}" for i in range(30)]
    pool = table_from_frame(frame, "severity", "state", test_fraction=0.5)
    assert pool.sites is not None and len(set(pool.sites)) == 33


def test_ten_thousand_categories_are_hashed_and_said() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"u": [f"u{i}" for i in rng.integers(0, 10_000, 40_000)], "y": rng.choice(["a", "b"], 40_000)})
    pool = table_from_frame(frame, "y")
    assert pool.train.x.shape[1] == 64 and any("levels)" in n and "'u'" in n for n in pool.notes)


def test_a_declared_schema_fixes_columns_and_levels(csv: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'label = "severity"\nclasses = ["minor", "serious", "fatal"]\n'
        '[[columns]]\nname = "road"\nkind = "category"\nlevels = ["urban", "rural", "dirt"]\nmissing = true\n'
        '[[columns]]\nname = "speed"\nkind = "numeric"\n'
    )
    pool = load(csv, schema=str(schema))
    assert pool.classes == ("minor", "serious", "fatal") and pool.train.x.shape[1] == 4 + 2 + 16


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"label": "Severty"}, "no label column 'Severty'; did you mean 'severity'"),
        ({}, {"label": ""}, "needs --label"),
        ({}, {"site": "province"}, "no site column 'province'"),
        ({}, {"site": "severity"}, "label and site are the same"),
        ({}, {"label": "case"}, "looks like a quantity or an id"),
        ({"severity": "minor"}, {}, "only one class, 'minor'"),
        ({"severity": None}, {}, "is empty"),
        ({}, {"exclude": ["speed", "road", "part", "state"]}, "no usable input column"),
        ({}, {"categories": ["rod"]}, "did you mean 'road'"),
        ({}, {"test_fraction": 1.5}, "outside"),
        ({}, {"exclude": 3}, "data.exclude = 3"),
        ({}, {"max_levels": 1}, "data.max_levels"),
    ],
)
def test_bad_tables_and_options_are_one_clear_line(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    path = tmp_path / "crashes.csv"
    crashes(100).assign(**change).to_csv(path, index=False)
    with pytest.raises(FedtailError, match=words) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)


def test_two_columns_with_the_label_s_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("severity,x,severity\n" + "a,1,a\nb,2,b\n" * 20)
    with pytest.raises(FedtailError, match="more than one column called 'severity'"):
        load(path)


def test_numeric_labels_are_names_in_numeric_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,severity\n" + "".join(f"{i % 13},{(10, 9, 2)[i % 3]}\n" for i in range(60)))
    assert load(path).classes == ("2", "9", "10")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_misspelt_column_to_leave_out_is_an_error_and_not_an_input(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    crashes().to_csv(path, index=False) if suffix == ".csv" else crashes().to_parquet(path)
    with pytest.raises(FedtailError, match="no column 'sped' for 'exclude'; did you mean 'speed'"):
        load(path, exclude=["road", "sped"])
    used = {c["name"] for c in load(path, exclude=["road", "speed"]).preprocessing["columns"]}
    assert not used & {"road", "speed"}


def test_columns_may_be_named_with_the_spaces_they_have_in_the_file(tmp_path: Path) -> None:
    frame = crashes().rename(columns={"severity": " severity ", "state": "state "})
    frame.to_csv(tmp_path / "t.csv", index=False)
    pool = load(tmp_path / "t.csv", label=" severity ", site="state ", exclude=[" speed"])
    assert (
        pool.preprocessing["label"] == "severity" and pool.sites is not None and set(pool.sites) == {"CA", "NY", "TX"}
    )
    assert table_from_frame(frame, " severity ", "state ").classes == pool.classes


def test_a_table_without_rows_to_test_says_so() -> None:
    frame = crashes(50).assign(state=lambda f: f["case"])  # one row per site: none can be held out
    assert any("no test rows" in n for n in table_from_frame(frame, "severity", "state").notes)


def test_a_category_whose_levels_are_all_in_held_out_rows_is_left_out() -> None:
    frame, row = crashes(60), np.arange(60)
    why = [
        table_from_frame(frame.assign(rare=np.where(row == i, "seen", None)), "severity").preprocessing["left_out"]
        for i in row
    ]
    assert 8 <= sum(left_out.get("rare") == "empty" for left_out in why) <= 16  # a fifth is held out


@pytest.mark.parametrize("labels", [[True, False], [3, 1], [1.5, 0.5], ["yes", "no"]])
def test_labels_of_a_parquet_file_keep_their_type(labels: list[object], tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(80.0) % 7, "y": labels * 40})
    frame.to_parquet(tmp_path / "t.parquet")
    pool = DATASETS.build("table", path=str(tmp_path / "t.parquet"), label="y")
    model = SavedModel.of(torch.nn.Linear(pool.train.x.shape[1], 2), partition(pool, clients=2))
    assert set(model.labels.tolist()) == set(labels)
    assert {type(label) for label in model.labels.tolist()} == {type(label) for label in labels}
