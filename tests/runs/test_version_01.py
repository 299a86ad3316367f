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
from fedtail.settings import RETIRED, Settings


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


def test_a_config_of_version_02_is_read_without_the_settings_that_are_gone(tmp_path: Path) -> None:
    now = settings(tmp_path, "x")
    raw = {section: {k: v for k, v in part.items() if v is not None} for section, part in now.model_dump().items()}
    for key, gone in RETIRED.items():
        if gone.value is not None:
            section, name = key.split(".")
            raw[section][name] = gone.value
    (tmp_path / "config.toml").write_text(tomli_w.dumps(raw))
    assert load_config(tmp_path) == now
    raw["server"]["reach"] = 2.0
    (tmp_path / "config.toml").write_text(tomli_w.dumps(raw))
    with pytest.raises(FedtailError, match=r"^server\.reach = 2\.0: this is no longer a setting, leave it out; "):
        load_config(tmp_path)


@pytest.mark.parametrize("key", RETIRED)
def test_a_setting_that_is_gone_is_refused_in_one_line_wherever_it_is_given(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    value = 1.0 if RETIRED[key].value is None else RETIRED[key].value
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({section: {name: value}}))
    for given in ({"path": tmp_path / "mine.toml"}, {"overrides": [f"{key}={value}"]}, {"flags": {key: value}}):
        with pytest.raises(FedtailError, match=rf"^{key} = .*: this is no longer a setting, leave it out; "):
            load_config(**given)  # type: ignore[arg-type]
