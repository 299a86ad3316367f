"""Codes are categories, marks are missing values, and every decision is told by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtail.data import DATASETS, partition, table_from_frame
from fedtail.data.inputs import prepare_inputs
from fedtail.data.registry import Pooled
from fedtail.data.tables.columns import missing_marks
from fedtail.errors import FedtailError

RNG = np.random.default_rng(0)
N = 1200
FRAME = pd.DataFrame(
    {
        "light": RNG.integers(1, 7, N),  # six codes
        "zip": [f"{v:05d}" for v in RNG.choice([501, 2139, 94105], N)],  # leading zeros
        "age": np.where(RNG.random(N) < 0.04, 999, RNG.integers(16, 95, N)),  # a mark
        "speed": RNG.normal(60, 9, N).round(1),
        "belt": RNG.integers(0, 2, N),  # two values: a number does
        "place": RNG.choice(["north", "south"], N),
        "case": [f"c{i}" for i in range(N)],
        "severity": RNG.choice(["minor", "fatal"], N, p=[0.9, 0.1]),
    }
)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def load(path: Path, **options: object) -> Pooled:
    return DATASETS.build("table", path=str(path), label="severity", **options)


def test_kinds_are_listed_by_name(csv: Path) -> None:
    pooled = load(csv)
    text = " | ".join(pooled.notes)
    assert "numbers: 'age' (999 as missing), 'speed', 'belt'" in text
    assert "categories: 'light' (6 levels), 'zip' (3 levels), 'place' (2 levels)" in text
    assert "'light' (6 different whole numbers), 'zip' (leading zeros); data.numbers=" in text
    zips = next(c for c in pooled.preprocessing["columns"] if c["name"] == "zip")
    assert zips["levels"] == ["00501", "02139", "94105"]


def test_numbers_declared_as_such_stay_numbers(csv: Path) -> None:
    pooled = load(csv, numbers="light,age")
    kinds = {c["name"]: c["kind"] for c in pooled.preprocessing["columns"]}
    age = next(c for c in pooled.preprocessing["columns"] if c["name"] == "age")
    assert kinds["light"] == kinds["age"] == "numeric" and "marks" not in age
    with pytest.raises(FedtailError, match=r"'light' is in data\.categories and in data\.numbers"):
        load(csv, numbers="light", categories="light")
    with pytest.raises(FedtailError, match="no column 'lihgt' for 'numbers'; did you mean 'light'"):
        load(csv, numbers="lihgt")


def test_new_rows_are_encoded_the_same_whether_codes_come_as_text_or_numbers(csv: Path) -> None:
    pooled = load(csv)
    new = FRAME.head(50)
    notes: list[str] = []
    shape = tuple(pooled.train.x.shape[1:])
    as_frame = prepare_inputs(new, pooled.preprocessing, shape, notes)
    as_floats = prepare_inputs(new.assign(light=new["light"].map("{:.1f}".format)), pooled.preprocessing, shape, notes)
    assert (as_frame == as_floats).all() and not notes


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ([0, 5, 23, 99, 99], (99.0,)),
        ([16, 80, 120, 997, 998, 999], (997.0, 998.0, 999.0)),
        ([10, 60, 99, 99], ()),  # percentages reach 99
        ([0, 3, 8, -9, -9], (-9.0,)),
        ([-12, -9, -9, 4], ()),  # temperatures
        ([0, 5, 23, 99], ()),  # once is no mark
    ],
)
def test_marks_of_missing_values(values: list[int], marks: tuple[float, ...]) -> None:
    distinct, counts = np.unique(np.array(values, dtype=float), return_counts=True)
    assert missing_marks(distinct, counts) == marks


def test_a_site_column_of_one_row_sites_is_refused_with_a_better_one(csv: Path) -> None:
    with pytest.raises(FedtailError, match=r"makes 1,200 sites, 1,200 of them of one row.* could be sites: 'zip'"):
        load(csv, site="case")


def test_a_table_without_sites_says_that_they_were_invented(csv: Path) -> None:
    assert any("sites were made up (dirichlet split, alpha 0.5)" in n for n in partition(load(csv)).notes)
    assert not any("made up" in n for n in partition(load(csv, site="place")).notes)


def test_a_frame_may_give_the_order_of_its_classes() -> None:
    assert table_from_frame(FRAME, "severity", classes=("minor", "fatal")).classes == ("minor", "fatal")
