"""Warnings of what makes figures mean less than they seem to."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedtail import Federation
from fedtail.data import table_from_frame
from fedtail.data.partitions import partition
from fedtail.runs.build import prepare
from fedtail.settings import Settings


def frame(n: int = 600) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    site = rng.choice(["north", "east", "south"], n, p=[0.5, 0.3, 0.2])
    return pd.DataFrame(
        {
            "age": rng.normal(size=n),
            "ward": rng.choice(["a", "b", "c"], n),
            "site": site,
            "result": np.where(rng.random(n) < 0.1, "ill", "well"),
        }
    )


def warnings_of(table: pd.DataFrame, **options: object) -> list[str]:
    return [note for note in table_from_frame(table, "result", "site", **options).notes if "warning" in note]  # type: ignore[arg-type]


def test_an_ordinary_table_gets_no_warning() -> None:
    assert warnings_of(frame()) == []


def test_labels_that_stand_for_nothing_are_named_with_their_rows() -> None:
    table = frame()
    table.loc[:11, "result"] = "?"
    table.loc[12:20, "result"] = "Unknown"
    marks = warnings_of(table)
    assert len(marks) == 2 and "'?' (12 rows)" in marks[0] and "'Unknown' (9 rows)" in marks[1]
    assert all("empty these cells" in note for note in marks)


def test_a_column_that_names_the_site_again_is_found_and_one_that_varies_within_sites_is_not() -> None:
    table = frame()
    table["hospital_id"] = table["site"].map({"north": "H1", "east": "H2", "south": "H3"})
    (note,) = warnings_of(table)
    assert "'hospital_id'" in note and 'data.exclude=["hospital_id"]' in note
    table.loc[::10, "hospital_id"] = "H1"
    assert warnings_of(table) == []


def test_dates_are_left_out_with_a_warning_where_test_rows_are_drawn_at_random() -> None:
    table = frame()
    table["day"] = pd.date_range("2024-01-01", periods=len(table)).strftime("%Y-%m-%d")
    (note,) = warnings_of(table)
    assert "'day'" in note and "data.test=FILE" in note
    assert warnings_of(table, test=table) == []


def test_small_sites_are_named_before_training() -> None:
    table = frame(240)
    federation = partition(table_from_frame(table, "result", "site"))
    assert isinstance(federation, Federation)
    (note,) = [note for note in prepare(federation, Settings()).about.notes if "fewer than 100" in note]
    assert "2 of 3 sites" in note or "3 of 3 sites" in note
    rare = table.assign(site=np.where(np.arange(len(table)) < 20, "a", "b"))
    (note,) = [
        n for n in prepare(partition(table_from_frame(rare, "result", "site")), Settings()).about.notes if "fewer" in n
    ]
    assert "1 of 2 sites has fewer than 100 training rows (a)" in note
    large = partition(table_from_frame(frame(2000), "result", "site"))
    assert not any("fewer than" in note for note in prepare(large, Settings()).about.notes)
    invented = partition(table_from_frame(table, "result"), clients=3)
    assert not any("fewer than" in note for note in prepare(invented, Settings()).about.notes)
