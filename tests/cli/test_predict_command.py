"""``fedtail predict`` and ``fedtail export`` from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.runs.saved import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"key": np.arange(200), "x": rng.normal(size=200), "site": rng.choice(["a", "b"], size=200)})
    rows["y"] = np.where(rows["x"] > 0.8, "rare", "usual")
    rows.to_csv(folder / "t.csv", index=False)
    run = ["run", "--table", str(folder / "t.csv"), "--label", "y", "--site", "site", "--rounds", "3", "-q"]
    run += ["--method", "fedcgnm"]  # trees export no program
    result = CliRunner().invoke(app, [*run, "--out", str(folder), "--name", "r"], catch_exceptions=False)
    assert result.exit_code == 0
    return folder


def invoke(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False).output


def test_a_csv_of_classes_and_probabilities_is_written(folder: Path) -> None:
    text = invoke("predict", "--run", folder / "r", folder / "t.csv", "--out", folder / "p.csv", "--keep", "key,y")
    out = pd.read_csv(folder / "p.csv")
    assert list(out.columns) == ["key", "y", "prediction", "p(rare)", "p(usual)"] and len(out) == 200
    probabilities = load_model(folder / "r").predict_proba(folder / "t.csv")
    assert np.allclose(out[["p(rare)", "p(usual)"]], probabilities, atol=1e-6)
    assert "200 predictions" in text and "200 rows have labels: accuracy" in text


def test_without_out_the_table_goes_to_standard_output(folder: Path) -> None:
    pd.read_csv(folder / "t.csv").drop(columns="y").head(3).to_csv(folder / "n.csv", index=False)
    lines = invoke("predict", "--run", folder / "r", folder / "n.csv", "-q").splitlines()
    assert lines[0] == "row,prediction,p(rare),p(usual)" and len(lines) == 4 and lines[3].startswith("3,")


def test_mistakes_are_one_clear_line(folder: Path) -> None:
    (folder / "short.csv").write_text("key\n1\n")
    for arguments, words in [
        (["predict", "--run", folder / "none", folder / "t.csv"], "model.json"),
        (["predict", "--run", folder / "r", folder / "short.csv"], "lacks column"),
        (["predict", "--run", folder / "r", folder / "t.csv", "--keep", "kez"], "did you mean 'key'"),
        (["predict", "--run", folder / "r", folder / "t.csv", "--out", folder / "t.csv" / "p.csv"], "cannot write"),
        (["export", folder / "r", "--onnx", folder / "m.pt2"], "must end in '.onnx'"),
    ]:
        with pytest.raises(FedtailError, match=words):
            invoke(*arguments)


def test_export_writes_a_graph(folder: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install 'fedtail[onnx]')")
    assert "wrote" in invoke("export", folder / "r", "--onnx", folder / "m.onnx")
    assert (folder / "m.onnx").stat().st_size > 0


def test_rows_of_a_class_the_model_does_not_know_are_told_and_not_scored(folder: Path) -> None:
    pd.read_csv(folder / "t.csv").head(9).replace({"y": {"usual": "new"}}).to_csv(folder / "u.csv", index=False)
    text = invoke("predict", "--run", folder / "r", folder / "u.csv", "--out", folder / "u-out.csv")
    new = int((pd.read_csv(folder / "u.csv")["y"] == "new").sum())
    assert f"{new} rows with a class unknown to the model ('new')" in text
    assert len(pd.read_csv(folder / "u-out.csv")) == 9


def test_a_threshold_on_the_command_line_finds_more_of_a_class(folder: Path) -> None:
    def called(*options: object) -> int:
        invoke("predict", "--run", folder / "r", folder / "t.csv", "--out", folder / "o.csv", *options)
        return int((pd.read_csv(folder / "o.csv")["prediction"] == "rare").sum())

    assert called("--threshold", "rare=0.01") > called() >= called("--threshold", "rare=0.999")
    for options, words in (
        (["--threshold", "rrare=0.1"], "did you mean 'rare'"),
        (["--threshold", "rare=2"], r"'2' is not a probability in \(0, 1\]; use e.g. rare=0.2"),
        (["--site", "x"], r"train with decision\.scope = 'site'"),
        (["--decision", folder / "t.csv"], "is not a decision for this model"),
    ):
        with pytest.raises(FedtailError, match=words):
            invoke("predict", "--run", folder / "r", folder / "t.csv", *options)
    (folder / "own.json").write_text('{"thresholds": [0.01, null]}')
    assert called("--decision", folder / "own.json") == called("--threshold", "rare=0.01")
