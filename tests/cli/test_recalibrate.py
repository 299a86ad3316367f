"""``fedtail recalibrate`` refits a model's decision for what the run was asked for."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtail as ft
from fedtail.cli import app
from fedtail.runs.judged import judge
from fedtail.runs.recalibrate import recalibrate


def rows(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    y = rng.random(n) < 0.1
    return pd.DataFrame(
        {"a": rng.normal(1.6 * y), "site": rng.choice(list("NSW"), n), "y": np.where(y, "rare", "usual")}
    )


def test_the_goal_of_the_run_folder_is_refitted(tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    rows(1000, 1).to_csv(new, index=False)
    federation = ft.Federation.from_tables(rows(1500, 0), label="y", site="site", validation=0.3)
    found = ft.fit(federation, "mlp", rounds=4, lr=0.3, decision={"goal": "balanced_accuracy"})
    folder = found.save(tmp_path / "run")
    said = CliRunner().invoke(app, ["recalibrate", str(new), "--run", str(folder), "--json"], catch_exceptions=False)
    after = json.loads(said.stdout.splitlines()[-1])["after"]
    judged = judge(folder, new)
    assert after == pytest.approx(recalibrate(judged, goal="balanced_accuracy").after)
    assert after != pytest.approx(recalibrate(judged, goal="macro_f1").after)
