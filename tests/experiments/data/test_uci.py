"""KDD Cup 1999 and the forest cover types, on made-up rows in the layout of their files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

import fedtail as ft
from fedtail.data import DATASETS, partition
from fedtail.errors import FedtailError
from fedtail_experiments.data.covertype import AREAS, CLASSES, CODES
from fedtail_experiments.data.kdd99 import CATEGORIES, COLUMNS, KINDS

ATTACKS = [attack for attacks in KINDS.values() for attack in attacks.split()]


def connections(folder: Path, labels: list[str], copies: int = 1) -> None:
    rng = np.random.default_rng(0)
    words = {"protocol_type": ["tcp", "udp"], "service": ["http", "smtp", "ftp"], "flag": ["SF", "S0"]}
    lines = []
    for label in labels:
        values = [str(rng.choice(words[c])) if c in CATEGORIES else f"{rng.integers(0, 99)}" for c in COLUMNS]
        lines += [",".join([*values, f"{label}."])] * copies
    folder.mkdir(parents=True)
    (folder / "kddcup.data_10_percent.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_a_connection_that_repeats_another_is_kept_once(tmp_path: Path) -> None:
    names = ["normal"] * 60 + ["smurf"] * 20 + ["satan"] * 6 + ["spy"] * 4 + ["perl"] * 3
    connections(tmp_path / "kddcup99", names, copies=5)
    pooled = DATASETS.build("kdd99", data_dir=str(tmp_path))
    assert pooled.classes == ("normal", "dos", "probe", "r2l", "u2r")
    assert len(pooled.train) + len(pooled.test) == len(names)
    columns = {c["name"]: c["kind"] for c in pooled.preprocessing["columns"]}
    assert len(columns) == 41 and columns["service"] == "category" and columns["land"] == "numeric"
    attacks = DATASETS.build("kdd99", data_dir=str(tmp_path), labels="attacks")
    assert attacks.classes == ("normal", "smurf", "satan", "spy", "perl")


def test_every_attack_has_one_kind_and_strange_files_are_one_line(tmp_path: Path) -> None:
    assert len(ATTACKS) == len(set(ATTACKS)) == 23 and len(COLUMNS) == 41
    connections(tmp_path / "kddcup99", ["normal"] * 9 + ["worm"])
    with pytest.raises(FedtailError, match=r"the label 'worm'; is it the file kddcup\.data_10_percent\.gz"):
        DATASETS.build("kdd99", data_dir=str(tmp_path))
    with pytest.raises(FedtailError, match=r"data\.labels = 'all'.*kinds, attacks|data\.labels"):
        DATASETS.build("kdd99", data_dir=str(tmp_path), labels="all")
    (tmp_path / "kddcup99" / "kddcup.data_10_percent.gz").write_bytes(b"no gzip")
    with pytest.raises(FedtailError, match="cannot be read"):
        DATASETS.build("kdd99", data_dir=str(tmp_path))


def test_wilderness_areas_are_sites_and_codes_become_names(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(1), 600
    area, soil, code = (
        rng.integers(0, 4, n),
        rng.integers(0, 40, n),
        rng.choice(CODES, n, p=[0.4, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05]),
    )
    table = np.column_stack(
        [rng.integers(0, 3000, (n, 10)), np.eye(4, dtype=int)[area], np.eye(40, dtype=int)[soil], code]
    )
    (tmp_path / "covertype").mkdir()
    file = tmp_path / "covertype" / "covtype.data.gz"
    file.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in table).encode()))
    pooled = DATASETS.build("covertype", data_dir=str(tmp_path))
    federation = partition(pooled)
    assert pooled.classes == CLASSES and set(federation.sites) == set(AREAS)
    assert {c["name"] for c in pooled.preprocessing["columns"] if c["kind"] == "category"} == {"soil"}
    labels = np.concatenate([pooled.train.y.numpy(), pooled.test.y.numpy()])
    assert np.bincount(labels, minlength=7).tolist() == [int((code == c).sum()) for c in CODES]
    assert ft.fit(federation, rounds=1, lr=0.1, rates=1.0).test["accuracy"] > 0
    file.write_bytes(gzip.compress(b"1,2,3\n4,5,6"))
    with pytest.raises(FedtailError, match="3 columns, expected 55"):
        DATASETS.build("covertype", data_dir=str(tmp_path))
