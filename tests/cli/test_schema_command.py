"""``fedtail data schema``: the proposal trains, after a person has completed it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.data import DATASETS
from fedtail.data.tables.schema import load_schema
from fedtail.errors import FedtailError


def invoke(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False).stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, lines in (("austin", "AB"), ("berlin", "BC")):
        frame = pd.DataFrame(
            {"temp": rng.normal(size=60), "line": rng.choice(list(lines), 60), "code": rng.integers(1, 4, 60)}
        )
        frame.assign(fault=rng.choice(["none", "crack"], 60)).to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def test_a_completed_proposal_covers_all_sites(folder: Path) -> None:
    out = folder / "schema.toml"
    invoke("data", "schema", folder / "austin.csv", "--label", "fault", "--categories", "code", "--out", out)
    schema = load_schema(out)
    assert [c.kind for c in schema.columns] == ["numeric", "category", "category"] and not schema.fitted
    text = out.read_text()
    assert '"A",' in text
    out.write_text(text.replace('"A",', '"A", "C",'))
    pool = DATASETS.build("site_tables", path=str(folder), label="fault", schema=str(out))
    assert not any("lacks" in note for note in pool.notes)


def test_the_proposal_goes_to_standard_output_or_to_json(folder: Path) -> None:
    assert 'label = "fault"' in invoke("data", "schema", folder / "austin.csv", "--label", "fault")
    invoke("data", "schema", folder / "austin.csv", "--label", "fault", "--out", folder / "s.json")
    assert load_schema(folder / "s.json").classes == ("crack", "none")


def test_mistakes_are_one_clear_line(folder: Path) -> None:
    for arguments, words in [
        (["--label", "falt"], "did you mean 'fault'"),
        (["--label", "fault", "--out", folder / "s.yaml"], "must end in .toml or .json"),
        (["--label", "fault", "--out", folder / "austin.csv" / "s.toml"], "cannot write"),
        (["--label", "fault", "--categories", "codes"], "did you mean 'code'"),
    ]:
        with pytest.raises(FedtailError, match=words):
            invoke("data", "schema", folder / "austin.csv", *arguments)
