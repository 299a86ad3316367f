"""Adult and UNSW-NB15: fixed layouts, exact ratios, clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtail.data.tables.columns import Numbers
from fedtail.data.tables.encode import encode, published, strict_columns
from fedtail.errors import FedtailError
from fedtail_experiments.data.adult import SCHEMA as ADULT
from fedtail_experiments.data.adult import adult, thin_minority
from fedtail_experiments.data.scaling import scaled
from fedtail_experiments.data.unsw import SCHEMA as UNSW
from fedtail_experiments.data.unsw import unsw

ROW = (
    "39, State-gov, {n}, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, {c}, {y}"
)


def write_adult(root: Path, majority: int = 400, minority: int = 100) -> Path:
    folder = root / "adult"
    folder.mkdir()
    rows = [ROW.format(n=i, c="Cuba", y="<=50K") for i in range(majority)]
    rows += [ROW.format(n=i, c="Peru", y=">50K") for i in range(minority)]
    half = len(rows) // 2
    train = [*rows[:half], ROW.format(n=1, c="?", y="<=50K")]
    (folder / "adult.data").write_text("\n".join(train) + "\n\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + "\n".join(f"{r}." for r in rows[half:]) + "\n")
    return root


def write_unsw(root: Path, name: str, rows: list[tuple[str, str, str, str]], repeat: int = 20) -> None:
    folder = root / "unsw-nb15"
    folder.mkdir(exist_ok=True)
    names = ["id", "dur", "proto", "service", "state", *(c.name for c in UNSW.numeric[1:]), "attack_cat", "label"]
    lines = [",".join(names)]
    for i, (proto, service, state, label) in enumerate(rows * repeat):
        numbers = [str((i * (j + 1)) % 17) for j in range(38)]
        lines.append(",".join([str(i), "0.5", proto, service, state, *numbers, label, "0"]))
    (folder / name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")


def test_layouts_have_the_published_widths() -> None:
    assert len(ADULT.features()) == len(set(ADULT.features())) == ADULT.width == 104
    assert [len(c.levels) for c in ADULT.columns if c.levels] == [7, 16, 7, 14, 6, 5, 2, 41]
    assert len(UNSW.features()) == len(set(UNSW.features())) == UNSW.width == 196
    assert [len(c.levels) for c in UNSW.columns if c.levels] == [133, 13, 11]
    assert len(UNSW.numeric) == 39


def test_adult_thins_the_minority_in_the_whole_pool_and_drops_unknowns(tmp_path: Path) -> None:
    pooled = adult(imbalance=8, data_dir=str(write_adult(tmp_path)))
    total = pooled.train.counts(2) + pooled.test.counts(2)
    assert total.tolist() == [400, 50]
    assert pooled.test.counts(2)[0] == 60 and pooled.test.counts(2)[1] in (7, 8)
    assert pooled.train.x.shape[1] == 104 and pooled.validation == pytest.approx(0.15 / 0.85)


def test_adult_columns_are_standardised_on_rows_outside_the_test_set(tmp_path: Path) -> None:
    x = adult(imbalance=4, data_dir=str(write_adult(tmp_path))).train.x.double()
    assert x[:, 1].mean().abs() < 1e-6 and (x[:, 1].std(correction=0) - 1).abs() < 1e-6
    assert (x[:, 0] == 0).all(), "constant columns become 0"
    assert set(x[:, 6:].unique().tolist()) == {0.0, 1.0} and (x[:, 6:].sum(1) == 8).all()


def test_adult_refuses_a_ratio_it_cannot_reach(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match=r"imbalance = 3 is outside \[4.000, 400\]"):
        adult(imbalance=3, data_dir=str(write_adult(tmp_path)))
    with pytest.raises(FedtailError, match="imbalance"):
        thin_minority(np.array([0, 0, 1]), -1, 0)


def test_adult_seeds_move_the_test_set(tmp_path: Path) -> None:
    root = str(write_adult(tmp_path))
    a, b, c = (adult(imbalance=4, seed=s, data_dir=root).test.x for s in (0, 0, 1))
    assert a.equal(b) and not a.equal(c)


def test_an_unpublished_category_is_named(tmp_path: Path) -> None:
    write_adult(tmp_path)
    path = tmp_path / "adult" / "adult.data"
    path.write_text(path.read_text().replace("Cuba", "Atlantis", 1))
    with pytest.raises(FedtailError, match=r"native-country = 'Atlantis' is not one of the 41 published values"):
        adult(imbalance=4, data_dir=str(tmp_path))


def test_unsw_reads_bom_and_crlf_and_always_has_196_columns(tmp_path: Path) -> None:
    write_unsw(tmp_path, "UNSW_NB15_testing-set.csv", [("udp", "-", "INT", "Normal"), ("tcp", "http", "FIN", "Worms")])
    pooled = unsw(data_dir=str(tmp_path))
    assert tuple(pooled.train.x.shape[1:]) == (196,) and len(pooled.train) + len(pooled.test) == 40
    assert pooled.train.x.min() >= 0 and pooled.train.x.max() <= 1
    assert "testing" in pooled.notes[0] and pooled.classes[0] == "Normal" and pooled.classes[-1] == "Worms"


def test_unsw_reads_either_file_or_both_whatever_a_mirror_calls_them(tmp_path: Path) -> None:
    rows = [("udp", "-", "INT", "Normal"), ("icmp", "-", "ECO", "Generic")]
    write_unsw(tmp_path, "UNSW_NB15_training-set.csv", rows, repeat=10)
    write_unsw(tmp_path, "UNSW_NB15_testing-set.csv", rows, repeat=30)
    sizes = {
        p: len((d := unsw(part=p, data_dir=str(tmp_path))).train) + len(d.test) for p in ("auto", "testing", "both")
    }
    assert sizes == {"auto": 60, "testing": 20, "both": 80}


def test_unsw_says_which_file_is_missing_and_which_labels_are_wrong(tmp_path: Path) -> None:
    write_unsw(tmp_path, "UNSW_NB15_testing-set.csv", [("udp", "-", "INT", "Normal")])
    with pytest.raises(FedtailError, match=r"part = 'both' needs the training file.*use data.part=testing"):
        unsw(part="both", data_dir=str(tmp_path))
    with pytest.raises(FedtailError, match=r"data.part 'train' is unknown"):
        unsw(part="train", data_dir=str(tmp_path))
    write_unsw(tmp_path, "UNSW_NB15_testing-set.csv", [("udp", "-", "INT", "Nonsense")])
    with pytest.raises(FedtailError, match="label 'Nonsense' is not among the schema's classes"):
        unsw(data_dir=str(tmp_path))
    (tmp_path / "unsw-nb15" / "UNSW_NB15_testing-set.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FedtailError, match="no column 'attack_cat'"):
        unsw(data_dir=str(tmp_path))


def test_scaling_uses_only_the_rows_it_is_given() -> None:
    columns = {"a": Numbers(np.array([0.0, 10.0, 1000.0]), True), "b": Numbers(np.array([5.0, 5.0, 6.0]), True)}
    schema = scaled(published("y", ("0", "1"), ("a", "b"), {}), columns, np.array([0, 1]), "minmax")
    assert encode(schema, columns).tolist() == [[0, 0], [1, 0], [100, 1]], "far beyond ten deviations, and kept"
    assert [(c.mean, c.std) for c in schema.numeric] == [(0, 10), (5, 1)]


def test_numbers_of_a_published_table_are_read_in_single_precision_as_older_models_were_trained_on() -> None:
    columns = strict_columns(published("y", ("0", "1"), ("a",), {}), pd.DataFrame({"a": ["16777217", "2"]}), "the file")
    assert isinstance(columns["a"], Numbers) and columns["a"].values.tolist() == [16777216.0, 2.0]
