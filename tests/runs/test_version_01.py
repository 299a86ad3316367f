"""Run folders of version 0.1 stay readable: resume, predict, report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import fedtail as ft
from fedtail.errors import FedtailError
from fedtail.report import load_run, write_report
from fedtail.rounds.state import State
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.settings import Settings


class Stopped(Exception):
    pass


def stop(state: State, record: dict[str, Any], seconds: float) -> None:
    if state.round == 2:
        raise Stopped


def settings(folder: Path, name: str) -> Settings:
    return load_config(
        None, ["data.name=blobs", "data.n_max=60", "run.rounds=4", f"run.folder={folder}", f"run.name={name}"]
    )


def age(folder: Path) -> None:
    """Turn a folder into what version 0.1 wrote: other names in the config, no titles."""
    raw = json.loads(json.dumps(load_config(folder / "config.toml").model_dump()))
    raw["deploy"]["validate_every"] = raw["run"].pop("validate_every")
    raw["engine"]["name"] = "simulator"
    kept = {s: {k: v for k, v in part.items() if v is not None} for s, part in raw.items()}
    (folder / "config.toml").write_text(tomli_w.dumps(kept))
    for name in ("clients.json", "result.json"):
        if (folder / name).is_file():
            about = json.loads((folder / name).read_text())
            about.pop("titles", None)
            (folder / name).write_text(json.dumps(about))
    for state in folder.glob("checkpoint/*/state.json"):
        about = json.loads(state.read_text())
        about["settings"]["deploy.validate_every"] = about["settings"].pop("run.validate_every")
        about["settings"]["engine.name"] = "simulator"
        state.write_text(json.dumps({key: value for key, value in about.items() if not key.startswith("sha256")}))


def test_an_interrupted_run_of_version_01_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    expected = run(settings(tmp_path, "whole"))
    with pytest.raises(Stopped):
        run(settings(tmp_path, "old"), on_round=stop)
    age(tmp_path / "old")
    resumed = run(settings(tmp_path, "old"), resume=True)
    assert torch.equal(resumed.x, expected.x)
    assert [r["train_loss"] for r in resumed.history] == [r["train_loss"] for r in expected.history]


def test_a_finished_run_of_version_01_predicts_and_is_reported(tmp_path: Path) -> None:
    now = run(settings(tmp_path, "now"))
    shutil.copytree(tmp_path / "now", tmp_path / "old")
    age(tmp_path / "old")
    old = ft.load_model(tmp_path / "old")
    rows = np.random.default_rng(0).normal(size=(5, *now.about.input_shape)).astype(np.float32)
    assert (old.predict_proba(rows) == ft.load_model(tmp_path / "now").predict_proba(rows)).all()
    page = write_report([load_run(tmp_path / "old")], tmp_path / "old.html", "old")
    assert "fedcgnm" in page.read_text(encoding="utf-8")


def test_settings_that_are_gone_are_read_in_the_config_of_a_run_folder_and_refused_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    raw = json.loads(json.dumps(settings(tmp_path, "r").model_dump()))
    raw["engine"] |= {"compile": "on", "kernels": "library", "threads": 2}
    (folder / "config.toml").write_text(tomli_w.dumps(without_none(raw)))
    assert load_config(folder).engine == Settings().engine == load_config(folder / "config.toml").engine
    with pytest.raises(FedtailError, match="'compile' is unknown"):
        load_config(None, ["engine.compile=on"])


def without_none(value: Any) -> Any:
    """What TOML can say of a config."""
    return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value
