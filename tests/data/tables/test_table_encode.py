"""Kinds of columns, schema files and encoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtail.data.tables.columns import Choices, Levels, Numbers, decimal_comma, infer_kind, level_numbers, parse_column
from fedtail.data.tables.encode import encode, frame_columns, hash_bucket
from fedtail.data.tables.schema import Column, TableSchema, load_schema, schema_text
from fedtail.errors import FedtailError


def kind_of(values: Any, name: str = "c", **options: Any) -> str:
    return infer_kind(name, parse_column(pd.Series(values)), Choices(**options)).name


def test_kinds_of_ordinary_columns() -> None:
    rng = np.random.default_rng(0)
    assert kind_of(rng.normal(size=50)) == "numeric"
    assert kind_of(rng.integers(0, 9, size=50)) == "numeric"
    assert kind_of([True, False] * 20) == "category"
    assert kind_of(["a", "b", None] * 20) == "category"
    assert kind_of(pd.Categorical(["a", "b"] * 20)) == "category"
    assert kind_of(["only", None] * 20) == "category"  # present or not is information
    assert kind_of(["only"] * 20) == kind_of([3.0] * 20) == "constant"
    assert kind_of([None] * 20) == kind_of([float("inf")] * 20) == "empty"


def test_dates_text_and_ids_are_recognized() -> None:
    days = pd.date_range("2020-01-01", periods=40)
    assert kind_of(days) == kind_of(days.astype(str)) == kind_of(days.strftime("%d.%m.%Y %H:%M")) == "date"
    assert (
        kind_of(days.strftime("%b %d, %Y")) == kind_of(days.strftime("%m/%d/%y")) == kind_of(["12:30"] * 39 + ["1:00"])
    )
    assert kind_of([f"car {i} left the road at speed in the rain" for i in range(100)]) == "text"
    assert kind_of([f"case-{i * 7919}" for i in range(100)]) == "id"
    assert kind_of(np.arange(100)) == kind_of(np.arange(100)[::-1] * 3) == "id"
    shuffled = np.random.default_rng(0).permutation(100)
    assert kind_of(shuffled, "case_id") == "id" and kind_of(shuffled, "paid") == "numeric"
    assert kind_of([f"part {i % 500}" for i in range(5000)]) == "category"


def test_numbers_written_as_text_are_numbers() -> None:
    assert kind_of(["1,234.5", "7", "1,000,000"] * 10) == "numeric"
    assert kind_of(["3,14", "2,5", "10"] * 10) == "numeric"
    assert decimal_comma(["3,14", "1,234"]) and not decimal_comma(["1,234", "7"])
    assert level_numbers(["3,14", "1,234", "10"], comma=True).tolist() == [3.14, 1.234, 10.0]
    assert level_numbers(["1,234", "7", "1,000.5"], comma=False).tolist() == [1234.0, 7.0, 1000.5]
    assert np.isnan(level_numbers(["1_000", "x", ""], comma=False)).all()


def test_a_few_words_among_numbers_count_as_missing_and_many_make_a_category() -> None:
    few = infer_kind("c", parse_column(pd.Series([str(i % 40) for i in range(97)] + ["broken"] * 3)))
    assert few.name == "numeric" and few.note is not None and "3 non-numeric fields" in few.note
    many = infer_kind("c", parse_column(pd.Series([str(i % 40) for i in range(80)] + ["x"] * 20)))
    assert many.name == "category" and many.note is not None and "mixes 80 numbers with 20" in many.note


def test_codes_can_be_declared_categories() -> None:
    column = parse_column(pd.Series(["01", "02", "1"] * 10))
    assert infer_kind("zip", column, Choices(categories=["zip"])).name == "category"


def test_spellings_of_one_level_are_merged() -> None:
    column = parse_column(pd.Series([" a", "a ", "b", "?", "", None, "TRUE", "true"]))
    assert isinstance(column, Levels)
    assert column.levels == ["a", "b", "true"] and column.codes.tolist() == [0, 0, 1, -1, -1, -1, 2, 2]


def test_infinities_and_overflowing_numbers_are_missing_and_counted() -> None:
    column = parse_column(pd.Series([1.0, np.inf, -np.inf, 1e300, 2.0]))
    assert isinstance(column, Numbers) and column.infinite == 3
    kind = infer_kind("c", column)
    assert kind.note is not None and "3 infinite values" in kind.note


SCHEMA = TableSchema(
    "label",
    ("no", "yes"),
    (
        Column("speed", "numeric", missing=True, mean=10.0, std=2.0),
        Column("road", "category", ("rural", "urban"), missing=True),
        Column("part", "hashed", buckets=4),
    ),
    site="state",
    left_out={"when": "date"},
)


def test_encoding_is_what_the_schema_says() -> None:
    frame = pd.DataFrame({"speed": [12.0, np.nan, 1e9], "road": ["urban", None, "lane"], "part": ["p1", "p2", None]})
    notes: list[str] = []
    x = encode(SCHEMA, frame_columns(SCHEMA, frame), notes=notes)
    one_hot = np.eye(4)
    expected = np.array(
        [
            [1.0, 0, 0, 1, 0, *one_hot[hash_bucket("p1", 4)]],
            [0.0, 1, 0, 0, 1, *one_hot[hash_bucket("p2", 4)]],
            [10.0, 0, 0, 0, 0, 0, 0, 0, 0],  # clipped; unknown level; missing without a place for it
        ]
    )
    assert x.dtype == np.float32 and np.array_equal(x, expected)
    assert SCHEMA.width == 9 == len(SCHEMA.features()) and SCHEMA.features()[3] == "road = urban"
    assert notes == [
        "'road': 1 rows have levels missing from the schema ('lane'); they were encoded as none of its levels"
    ]
    rows = np.array([2, 0])
    assert np.array_equal(encode(SCHEMA, frame_columns(SCHEMA, frame), rows), expected[rows])


def test_hash_buckets_never_change() -> None:
    assert [hash_bucket(v, 64) for v in ("", "a", "Köln")] == [0, 3, 59]


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(-50, 50),
            st.none() | st.sampled_from(["rural", "urban", "lane", ""]),
            st.none() | st.text("pq", max_size=2),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_each_row_is_encoded_by_itself(rows: list[tuple[Any, Any, Any]]) -> None:
    frame = pd.DataFrame(rows, columns=["speed", "road", "part"])
    frame["speed"] = frame["speed"].astype(float)
    together = encode(SCHEMA, frame_columns(SCHEMA, frame))
    alone = [encode(SCHEMA, frame_columns(SCHEMA, frame.iloc[[i]]))[0] for i in range(len(frame))]
    assert np.array_equal(together, np.stack(alone))
    assert (together[:, 2:5].sum(1) <= 1).all() and (together[:, 5:].sum(1) <= 1).all()


def test_a_table_that_does_not_fit_the_schema_is_refused() -> None:
    with pytest.raises(FedtailError, match=r"lacks columns 'road', 'part' \(it has 'speed'\)"):
        frame_columns(SCHEMA, pd.DataFrame({"speed": [1.0]}), "site 'a'")
    frame = pd.DataFrame({"speed": ["fast", "slow", "3"], "road": ["urban"] * 3, "part": ["x"] * 3})
    with pytest.raises(FedtailError, match=r"'speed' should be numbers, but 2 of 3 fields are not \(first: 'fast'\)"):
        frame_columns(SCHEMA, frame)
    frame["speed"] = pd.date_range("2020", periods=3)
    with pytest.raises(FedtailError, match="contains dates"):
        frame_columns(SCHEMA, frame)
    with pytest.raises(FedtailError, match="fit it first"):
        encode(SCHEMA.unfitted(), {})


def test_an_encoding_that_would_not_fit_in_memory_is_refused_before_it_is_made() -> None:
    wide = replace(SCHEMA, columns=(*SCHEMA.columns[:2], Column("part", "hashed", buckets=10**9)))
    frame = pd.DataFrame({"speed": [1.0] * 9, "road": ["urban"] * 9, "part": ["x"] * 9})
    with pytest.raises(FedtailError, match=r"would take 36 GB.*'part': 1000000000"):
        encode(wide, frame_columns(wide, frame))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_schema_files_round_trip(tmp_path: Path, suffix: str) -> None:
    for schema in (SCHEMA, SCHEMA.unfitted()):
        path = tmp_path / f"schema{suffix}"
        path.write_text(schema_text(schema, suffix), encoding="utf-8")
        assert load_schema(path) == schema
    assert TableSchema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": ""}, "label = '' is not allowed"),
        ({"classes": ["a"]}, "two or more different"),
        ({"classes": ["a", "a"]}, "two or more different"),
        ({"columns": []}, r"columns = \[\] is not allowed"),
        ({"colums": []}, "did you mean 'columns'"),
        ({"clip": 0}, "clip = 0"),
        ({"format": 9}, "another version"),
        ({"columns": [{"kind": "numeric"}]}, "column 1 needs 'name'"),
        ({"columns": [{"name": "a", "kind": "number"}]}, "did you mean 'numeric'"),
        ({"columns": [{"name": "a", "kind": "category"}]}, "needs 'levels'"),
        ({"columns": [{"name": "a", "kind": "hashed", "buckets": 1}]}, "2 or more"),
        ({"columns": [{"name": "a", "kind": "numeric", "mean": "x"}]}, "mean = 'x'"),
        ({"columns": [{"name": "a", "kind": "numeric", "std": 0}]}, "greater than 0"),
        ({"columns": [{"name": "a", "kind": "numeric", "level": []}]}, "did you mean 'levels'"),
        ({"columns": [{"name": "a", "kind": "numeric"}] * 2}, "listed twice"),
        ({"columns": [{"name": "label", "kind": "numeric"}]}, "cannot be an input"),
    ],
)
def test_mistakes_in_a_schema_are_one_clear_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FedtailError, match=words) as caught:
        TableSchema.from_dict({**SCHEMA.to_dict(), **change}, "schema 's.toml'")
    assert str(caught.value).startswith("schema 's.toml'") and "\n" not in str(caught.value)


def test_schema_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match=r"schema .* does not exist"):
        load_schema(tmp_path / "none.toml")
    for name in ("bad.toml", "bad.json"):
        (tmp_path / name).write_text("{ nonsense")
        with pytest.raises(FedtailError, match="cannot be read"):
            load_schema(tmp_path / name)
