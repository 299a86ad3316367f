"""``fedtail data``: list, get, inspect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.cli.data import show
from fedtail.data import DATASETS, Federation
from fedtail.data.inspection import inspect
from fedtail.datasets import load
from fedtail.errors import FedtailError

runner = CliRunner()


def invoke(*arguments: str) -> str:
    result = runner.invoke(app, ["data", *arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_list_names_every_data_set_and_says_whether_its_files_are_here(tmp_path: Path) -> None:
    entries = {e["name"]: e for e in json.loads(invoke("list", "--json", "--data-dir", str(tmp_path)))}
    assert set(entries) == set(DATASETS)
    assert entries["digits"]["state"] == "built in" and entries["images"]["state"] == "yours"
    assert entries["cifar10"]["state"] == "download" and entries["unsw"]["state"] == "by hand"
    assert "imbalance" in entries["cifar10"]["options"]
    text = invoke("list", "--data-dir", str(tmp_path))
    assert all(name in text for name in DATASETS)


def test_get_says_when_nothing_needs_fetching_and_how_to_get_what_has_no_link(tmp_path: Path) -> None:
    assert "digits  needs no download" in invoke("get", "digits")
    with pytest.raises(FedtailError, match="no stable direct link"):
        invoke("get", "unsw", "--data-dir", str(tmp_path))
    with pytest.raises(FedtailError, match="did you mean 'adult'"):
        invoke("get", "adlt")


def test_inspect_prints_the_table_of_a_named_set_with_overrides() -> None:
    found = json.loads(invoke("inspect", "digits", "data.imbalance=50", "--clients", "3", "--json"))
    assert len(found["sites"]) == 3 and found["rate"] == 0.6
    pool = load("digits", imbalance=50).train
    assert sum(s["train"] + s["validation"] for s in found["sites"]) == len(pool)
    text = invoke("inspect", "digits", "--clients", "3", "--partition", "iid", "--rate", "0.4")
    assert "client 2" in text and "rarest of 2 groups at rate 0.4" in text and "label skew" in text


def test_inspect_takes_an_image_folder_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))
    for site, sizes in (("north", (12, 4)), ("south", (9, 0))):
        for name, n in zip(("good", "bad"), sizes, strict=True):
            for i in range(n):
                path = tmp_path / "parts" / site / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8), i, dtype=np.uint8)).save(path)
    text = invoke("inspect", "--images", str(tmp_path / "parts"))
    assert "south lacks bad" in text and "· missing (1 of 2 sites)" in text


def test_inspect_shows_thousands_of_sites_in_one_screen() -> None:
    text = invoke("inspect", "blobs", "data.n_max=4000", "--clients", "1000", "--partition", "iid")
    assert "…" in text and "client 999" in text and "·" not in text and len(text.splitlines()) < 50


def test_in_a_narrow_terminal_names_give_way_and_figures_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    long = [f"the site with the number {k} and a long name" for k in range(3)]
    names = np.array(["commonest of all", "a rarer one", "the rarest kind"])
    clients = [(np.zeros((3000, 2), dtype=np.float32), names[np.arange(3000) % 3]) for _ in long]
    show(inspect(Federation.from_arrays(clients, sites=long)), width=72)
    text = capsys.readouterr().out
    assert "·" not in text and "the site" in text and "2,…" not in text and text.count("2,1") >= 3


def test_inspect_refuses_unknown_names_and_two_sources() -> None:
    with pytest.raises(FedtailError, match="did you mean 'digits'"):
        invoke("inspect", "digit")
    with pytest.raises(FedtailError, match="both name the data"):
        invoke("inspect", "digits", "--images", "x")
