"""One file per site: what is shared is a schema and moments, and the result equals pooled scaling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtail.data import DATASETS
from fedtail.data.tables.encode import encode_site
from fedtail.data.tables.sites import propose_schema, read_site, site_files
from fedtail.data.tables.sketch import fit_schema, merge_moments, moments_of
from fedtail.errors import FedtailError


def site_frame(seed: int, n: int = 80, shift: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "temp": np.where(rng.random(n) < 0.05, np.nan, rng.normal(20 + shift, 3, size=n)),
            "line": rng.choice(["A", "B"], size=n),
            "fault": rng.choice(["none", "crack"], size=n, p=[0.8, 0.2]),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k, name in enumerate(("berlin", "austin", "osaka")):
        site_frame(k, shift=5.0 * k).to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def test_sites_are_named_by_their_files_and_keep_their_rows(folder: Path) -> None:
    pool = DATASETS.build("site_tables", path=str(folder), label="fault")
    assert pool.sites is not None and sorted(set(pool.sites)) == ["austin", "berlin", "osaka"]
    assert len(pool.train) + len(pool.test) == 240 and pool.classes == ("crack", "none")
    assert "come from the first site, 'austin'" in pool.notes[0]
    by_pattern = DATASETS.build("site_tables", path=str(folder / "*.csv"), label="fault")
    assert bool((by_pattern.train.x == pool.train.x).all())


def test_federated_scaling_equals_scaling_of_all_training_rows_together(folder: Path) -> None:
    pool = DATASETS.build("site_tables", path=str(folder), label="fault", pieces=0)
    numbers, missing = pool.train.x[:, 0].double(), pool.train.x[:, 1]
    known = numbers[missing == 0]
    assert abs(float(known.mean())) < 1e-6 and abs(float(known.std(unbiased=False)) - 1) < 1e-6
    assert pool.train.x.shape[1] == 2 + 3


def test_a_real_site_gets_the_same_rows_from_the_same_functions(folder: Path) -> None:
    schema, _ = propose_schema(folder / "austin.csv", "fault")
    assert not schema.fitted
    sites = [read_site(p, schema, name=n) for n, p in site_files(folder).items()]
    fitted = fit_schema(schema, merge_moments([moments_of(schema, s.columns) for s in sites]))
    samples = [encode_site(s, fitted) for s in sites]
    assert [len(s) for s in samples] == [80, 80, 80]
    raw = pd.concat([pd.read_csv(folder / f"{n}.csv") for n in ("austin", "berlin", "osaka")])
    temp = next(c for c in fitted.columns if c.name == "temp")
    assert np.isclose(temp.mean, raw["temp"].mean()) and np.isclose(temp.std, raw["temp"].std(ddof=0))


def test_a_column_that_only_another_site_has_is_ignored_and_said(folder: Path) -> None:
    site_frame(9).assign(speed=1.5).to_csv(folder / "zagreb.csv", index=False)
    pool = DATASETS.build("site_tables", path=str(folder), label="fault")
    assert [n for n in pool.notes if "ignored" in n] == [
        "site 'zagreb': ignored, since the schema does not have it: column 'speed'"
    ]


def test_a_level_the_schema_lacks_is_encoded_as_none_and_said(folder: Path) -> None:
    site_frame(9).assign(line="C").to_csv(folder / "zagreb.csv", index=False)
    pool = DATASETS.build("site_tables", path=str(folder), label="fault")
    assert any(n.startswith("site 'zagreb'") and "'C'" in n for n in pool.notes)


def test_a_declared_schema_replaces_the_proposal(folder: Path) -> None:
    (folder / "schema.toml").write_text(
        'label = "fault"\nclasses = ["none", "crack", "void"]\n'
        '[[columns]]\nname = "line"\nkind = "category"\nlevels = ["A", "B", "C"]\n'
    )
    pool = DATASETS.build("site_tables", path=str(folder), schema=str(folder / "schema.toml"))
    assert pool.classes == ("none", "crack", "void") and pool.train.x.shape[1] == 3
    assert "warning: no training rows of class void" in pool.notes
    with pytest.raises(FedtailError, match="the schema's label is 'fault'"):
        DATASETS.build("site_tables", path=str(folder), label="line", schema=str(folder / "schema.toml"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", "temp,line,fault\n", "no rows"),
        ("x.csv", "temp,line\n1,A\n", "site 'x' has no label column 'fault'"),
        ("x.csv", "line,fault\nA,none\n", r"site 'x' lacks column 'temp'"),
        ("x.csv", "temp,line,fault\n1,A,dent\n", "site 'x': label 'dent' is not among the schema's classes"),
        ("x.csv", "temp,line,fault\nhot,A,none\ncold,B,crack\n", "'temp' should be numbers"),
        ("x.csv", "temp,line,fault\n1,A,\n", "label column 'fault' is empty"),
    ],
)
def test_a_bad_site_is_named(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(FedtailError, match=words) as caught:
        DATASETS.build("site_tables", path=str(folder), label="fault")
    assert "\n" not in str(caught.value)


def test_no_tables_no_label_and_one_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="no tables at"):
        DATASETS.build("site_tables", path=str(tmp_path), label="fault")
    for name in "ab":
        site_frame(0).to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(FedtailError, match="needs --label"):
        DATASETS.build("site_tables", path=str(tmp_path))
    (tmp_path / "s.json").write_text(
        '{"label": "fault", "classes": ["none", "x"], "columns": [{"name": "temp", "kind": "numeric"}]}'
    )
    for name in "ab":
        site_frame(0).assign(fault="none").to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(FedtailError, match="only one class, 'none'"):
        DATASETS.build("site_tables", path=str(tmp_path), schema=str(tmp_path / "s.json"))


def test_equal_stems_fall_back_to_file_names(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "b.csv"):
        (tmp_path / name).write_text("x\n1\n")
    assert list(site_files(tmp_path)) == ["a.csv", "a.tsv", "b"]
