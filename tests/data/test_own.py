"""Federations from data of the user's own, in one call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedtail as ft


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    n = 200
    severe = rng.random(n) < 0.3
    return pd.DataFrame(
        {
            "age": 40 + 10 * severe + rng.normal(0, 5, n),
            "ward": rng.choice(["a", "b"], n),
            "town": rng.choice(["north", "south"], n),
            "outcome": np.where(severe, "severe", "mild"),
        }
    )


def test_one_table_with_a_site_column_or_a_table_per_site_are_the_same(frame: pd.DataFrame, tmp_path: Path) -> None:
    one = ft.Federation.from_tables(frame, "outcome", site="town")
    each = {str(town): part.drop(columns="town") for town, part in frame.groupby("town")}
    several = ft.Federation.from_tables(each, "outcome")
    assert one.sites == several.sites == ("north", "south") and one.classes == several.classes
    assert one.sizes.sum() == several.sizes.sum()
    for name, part in each.items():
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    files = ft.Federation.from_tables(tmp_path, "outcome", validation=0.2)
    assert files.sites == ("north", "south") and all(len(v) for v in files.validation)
    frame.to_csv(tmp_path / "all.csv", index=False)
    assert ft.Federation.from_tables(tmp_path / "all.csv", "outcome", site="town").sites == ("north", "south")


def test_a_table_per_site_and_a_site_column_exclude_each_other(frame: pd.DataFrame) -> None:
    with pytest.raises(ft.FedtailError, match="one table per site without `site`"):
        ft.Federation.from_tables({"x": frame}, "outcome", site="town")


def test_folders_of_images_are_sites_and_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in ("mill", "yard"):
        for name in ("good", "bad"):
            folder = tmp_path / site / name
            folder.mkdir(parents=True)
            for i in range(10):
                Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{i}.png")
    federation = ft.Federation.from_images(tmp_path, cache=False, validation=0.25)
    assert federation.sites == ("mill", "yard") and federation.classes == ("bad", "good")
    assert federation.input_shape == (1, 8, 8)


def test_fit_takes_for_own_data_what_the_command_line_takes(frame: pd.DataFrame) -> None:
    federation = ft.Federation.from_tables(frame, "outcome", site="town", validation=0.2)
    grown = ft.fit(federation, rounds=2).settings
    assert (grown.method.name, grown.run.select, grown.decision.goal) == ("trees", "best", "macro_f1")
    assert ft.fit(federation, rounds=1, lr=0.2).settings.method.name == "fedcgnm", "trees have no local.lr"
    found = ft.fit(federation, method="fedcgnm", rounds=4).settings
    assert (found.local.lr, found.run.metric, found.run.select, found.run.patience) == ("auto", "macro_f1", "best", 15)
    assert (found.local.batch_size, found.decision.goal) == ("auto", "macro_f1")
    assert found.model.name == "residual_mlp" or found.model.name == "auto"
    said = ft.fit(federation, "mlp", rounds=1, lr=0.2, select="last").settings
    assert (said.local.lr, said.run.select, said.run.metric, said.model.name) == (0.2, "last", "macro_f1", "mlp")
    blind = ft.fit(
        ft.Federation.from_tables(frame, "outcome", site="town", validation=0), method="fedcgnm", rounds=1
    ).settings
    assert (blind.local.lr, blind.run.select, blind.run.metric) == (0.1, "last", "macro_f1")
    assert blind.local.batch_size == "auto", "sizes are known without validation data"
    assert blind.decision.goal == "argmax"
    plain = ft.fit(federation, "mlp", rounds=1, lr=0.2, decision={"goal": "argmax"})
    assert plain.settings.decision.goal == "argmax" and plain.before is None


def test_sites_that_agree_on_the_commonest_class_alone_still_find_the_rare_one() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3000, 6)), rng.random(3000) < 0.06
    x[y, 0] += 2.0
    frame = pd.DataFrame(x, columns=list("abcdef")).assign(fault=np.where(y, "yes", "no"))
    federation = ft.Federation.from_tables(frame, "fault", clients=20, alpha=1.0, seed=1, validation=0.2)
    found = ft.fit(federation, None, "fedavg", rounds=6, lr=0.3, rates=0.0)
    assert found.before is not None and found.before["tail"] < 0.1, "the likeliest class is hardly ever the rare one"
    assert found.test["macro_f1"] > found.before["macro_f1"] + 0.1 and found.test["tail"] > 0.3
