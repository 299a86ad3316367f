"""docs/your-data.md and docs/models.md run as they stand, top to bottom."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.models import MODELS, build_model

DOCS = Path(__file__).parents[1] / "docs"


def run_page(page: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the python blocks and ``$ fedtail`` lines of a page in order; the python scope and the commands' outputs."""
    scope: dict[str, Any] = {}
    outputs = []
    for language, block in re.findall(r"```(python|console)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
        if language == "python":
            exec(compile(block, str(page), "exec"), scope)
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            assert words[:2] == ["$", "fedtail"]
            result = CliRunner().invoke(app, words[2:], catch_exceptions=False)
            assert result.exit_code == 0, result.output
            outputs.append(result.output)
    return scope, outputs


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
def test_your_data_runs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "your-data.md"
    scope, outputs = run_page(page)
    predicted = pd.read_csv(workplace / "predicted.csv")
    assert (
        list(predicted.columns) == ["case", "prediction", "p(fatal)", "p(minor)", "p(serious)"]
        and len(predicted) == 200
    )
    assert len(pd.read_csv(workplace / "photos.csv")) == 8
    assert (workplace / "crashes.onnx").is_file() and scope["federation"].n_clients == 2
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) < 900, "a page of five minutes"
    for note in re.findall(r"^note: (.*)$", text, flags=re.M):
        assert f"note: {note}" in outputs[1]
    assert "3,000 rows; 20 features" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", re.findall(r"^error: (.*)$", (DOCS / "your-data.md").read_text(encoding="utf-8"), re.M)
)
def test_the_errors_on_the_page_are_the_real_ones(workplace: Path, line: str) -> None:
    from fedtail.data import DATASETS
    from fedtail.errors import FedtailError

    header = "case,date,state,speed,road,severity\n"
    row = "1,2024-01-01,NY,50,rural,minor\n"
    (workplace / "crashes.csv").write_text(
        header + row * 15 + (row.replace("\n", ",x\n") if "line 17" in line else row)
    )
    sites = workplace / "sites"
    sites.mkdir()
    (sites / "CA.csv").write_text("speed,road,severity\n" + "1,a,minor\n2,b,fatal\n" * 20)
    (sites / "NY.csv").write_text("speed,severity\n" + "1,minor\n2,fatal\n" * 20)
    name, options = "table", {"path": "crashes.csv", "label": "Severty" if "Severty" in line else "severity"}
    if line.startswith("site"):
        name, options = "site_tables", {"path": "sites", "label": "severity"}
    with pytest.raises(FedtailError) as caught:
        DATASETS.build(name, **options)
    assert str(caught.value) == line


@pytest.mark.slow
def test_models_runs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.pop("my_net", None)
    run_page(DOCS / "models.md")
    assert capsys.readouterr().out == "the model has 1 BatchNorm layer\nGroupNorm\n"
    assert "GroupNorm" not in (workplace / "runs" / "own" / "model.json").read_text()


def test_every_model_is_on_the_page_with_its_size() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in MODELS)
    for name, shape, classes, count in [
        ("mlp", (104,), 2, "4,154"),
        ("cnn_lstm", (196,), 10, "822,794"),
        ("small_cnn", (3, 32, 32), 10, "94,762"),
    ]:
        assert f"{sum(p.numel() for p in build_model(name, shape, classes).parameters()):,}" == count
        assert count in text
