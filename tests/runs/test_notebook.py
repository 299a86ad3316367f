"""For people at a notebook: the tutorial runs as it stands, results draw themselves, callbacks end a run."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtail as ft
from fedtail.data import Federation
from tests.conftest import blob_federation

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_shows_on_a_code_host_what_it_shows_here(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("execute", path.parent / "execute.py")
    assert spec is not None and spec.loader is not None
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    notebook = json.loads(path.read_text())
    stored = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    fresh = execute.run_notebook(notebook)

    def kinds(cells: list[list[dict[str, Any]]]) -> list[list[list[str]]]:
        return [[sorted(output.get("data", {"stream": ""})) for output in outputs] for outputs in cells]

    assert kinds(stored) == kinds(fresh), "run: python notebooks/execute.py"
    pictures = [o["data"]["image/png"] for cell in stored for o in cell if "image/png" in o.get("data", {})]
    assert len(pictures) == 5 and all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert path.stat().st_size < 120_000


@pytest.fixture(scope="module")
def result() -> ft.Result:
    wide = blob_federation(n_max=200, spread=3.0)
    goal = {"calibrate": "temperature", "goal": "macro_f1", "scope": "site"}
    return ft.fit(wide, "mlp", "fedavg", 0.2, rounds=3, lr=0.2, decision=goal)


@pytest.mark.parametrize("kind", ["curves", "classes", "sites", "reliability", "pr"])
def test_every_plot_shows_the_numbers_of_the_result(result: ft.Result, kind: str) -> None:
    figure = result.plot(kind)
    axes = figure.axes[0]
    legend = figure.legends[0] if figure.legends else axes.get_legend()
    labels = [text.get_text() for text in legend.get_texts()]
    if kind == "sites":
        drawn = {tuple(line.get_xdata()): line for line in axes.lines if line.get_marker() == "o"}
        values = list(drawn)[1]
        assert labels == ["plain argmax", "with decision rule"]
        assert list(values) == sorted(values) and values[0] == pytest.approx(result.worst["value"])
        assert axes.get_yticklabels()[0].get_text().startswith(result.worst["site"])
    elif kind == "classes":
        values = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
        rarest_first = np.argsort(result.about.train_counts, kind="stable")
        for key, shown in zip(("accuracy", "precision"), values, strict=True):
            expected, nothing = np.array(result.test[f"per_class_{key}"])[rarest_first], np.isnan(shown)
            assert shown[~nothing] == pytest.approx(expected[~nothing]) and not nothing.all()
            assert not expected[nothing].any(), "a share of nothing is not drawn"
        assert labels == ["recall", "precision"]
    elif kind == "curves":
        assert labels == ["test", "validation", "worst site", "majority only"]
    elif kind == "reliability":
        assert labels == ["before calibration", "calibrated"]
    else:
        assert len(labels) == len(result.about.classes) and all("(" in label for label in labels)


def test_a_plot_is_a_png_wherever_it_is_shown(result: ft.Result) -> None:
    png = result.plot("classes")._repr_png_()
    assert png.startswith(b"\x89PNG") and 5_000 < len(png) < 60_000


def test_a_plot_that_is_none_is_one_line(result: ft.Result) -> None:
    with pytest.raises(ft.FedtailError, match="did you mean 'sites'"):
        result.plot("site")


def test_notebooks_show_small_tables(result: ft.Result, federation: Federation) -> None:
    page = result._repr_html_()
    assert "<th>Macro F1</th>" in page and "<td>likeliest class</td>" in page and len(page) < 3000
    table = federation._repr_html_()
    assert all(f"<td>{site}</td>" in table for site in federation.sites)


def test_a_callback_can_end_a_run_and_all_of_them_are_called(federation: Federation) -> None:
    seen: list[int] = []
    ends = lambda state, record, seconds: state.round == 2  # noqa: E731
    notes = lambda state, record, seconds: seen.append(record["round"])  # noqa: E731
    result = ft.fit(federation, "mlp", "fedavg", 0.2, rounds=9, lr=0.2, on_round=[ends, notes])
    assert seen == [0, 1] and result.summary["rounds"] == 2 and np.isfinite(result.test["macro_f1"])
