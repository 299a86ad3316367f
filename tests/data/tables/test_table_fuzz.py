"""Whatever a table holds: one clear line, or samples that prediction makes again from the raw file, bit for bit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtail.data import DATASETS, table_from_frame
from fedtail.data.inputs import prepare_inputs
from fedtail.errors import FedtailError

fields = st.one_of(
    st.sampled_from(
        ["", "NA", "?", "0", "1", "1.0", "01", "-3e2", "1,5", "1,234", "inf", "nan", "True", "false", "a", "b"]
    ),
    st.sampled_from(["2020-01-02", "12:30", " a ", '"', "a,b", "é", "1_000", "None", "0x10", "1e999", "x" * 200]),
    st.floats(allow_nan=False).map(str),
    st.integers(-(10**20), 10**20).map(str),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=5),
)
tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[fields] * width, st.sampled_from(["p", "q", "r", ""])), min_size=2, max_size=40)
)


@given(tables, st.sampled_from([2, 64]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prediction_repeats_training_s_encoding_from_the_raw_file(
    tmp_path: Path, rows: list[tuple[str, ...]], max_levels: int
) -> None:
    names = [*(f"c{i}" for i in range(len(rows[0]) - 1)), "label"]
    path = tmp_path / "t.csv"
    pd.DataFrame(rows, columns=names).to_csv(path, index=False)
    try:
        pool = DATASETS.build("table", path=str(path), label="label", test_fraction=0.0, max_levels=max_levels)
    except FedtailError as error:
        assert "\n" not in str(error)
        return
    x = pool.train.x.numpy()
    assert np.isfinite(x).all() and np.abs(x).max(initial=0) <= 10.0
    saved = json.loads(json.dumps(pool.preprocessing))
    again = prepare_inputs(path, saved, (x.shape[1],), []).numpy()
    labelled = np.array([row[-1] != "" for row in rows])
    assert np.array_equal(again[labelled], x)


objects = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.sampled_from(["a", "b", "", "1", "2,5"]),
    st.dates().map(pd.Timestamp), st.binary(max_size=2), st.tuples(st.integers(0, 1)), st.just(pd.NA), st.just(pd.NaT),
    st.decimals(allow_nan=False, places=2, min_value=-9, max_value=9), st.timedeltas(),
)  # fmt: skip


@given(st.lists(st.tuples(objects, objects, st.sampled_from([0, 1, "x", None])), min_size=1, max_size=30))
@settings(max_examples=150)
def test_frames_of_any_objects_load_or_are_refused_in_one_line(rows: list[tuple[Any, ...]]) -> None:
    frame = pd.DataFrame(rows, columns=["a", "b", "y"], dtype=object)
    try:
        pool = table_from_frame(frame, "y")
    except FedtailError as error:
        assert "\n" not in str(error)
    else:
        assert np.isfinite(pool.train.x.numpy()).all()
        json.dumps(pool.preprocessing)


@given(st.binary(max_size=120), st.sampled_from(["label", "a"]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_behind_a_good_header_load_or_are_refused_in_one_line(tmp_path: Path, data: bytes, label: str) -> None:
    out = io.BytesIO(b"a,b,label\n1,x,p\n2,y,q\n" * 1 + data)
    path = tmp_path / "t.csv"
    path.write_bytes(out.getvalue())
    try:
        DATASETS.build("table", path=str(path), label=label)
    except FedtailError as error:
        assert "\n" not in str(error)
