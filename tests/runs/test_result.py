"""What a finished run offers: a small table, figures, a page, a folder that everything else reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedtail as ft
from fedtail.data import Federation
from fedtail.report import load_run
from fedtail.runs.result import Result


@pytest.fixture
def result(federation: Federation) -> Result:
    return ft.fit(federation, "mlp", "fedcgnm", rates=0.4, rounds=3, lr=0.2)


def test_it_prints_as_a_small_table_beside_the_floor(result: Result) -> None:
    lines = repr(result).splitlines()
    assert max(map(len, lines[:4])) < 100
    assert "FedCGNM + U" in lines[0] and "3 rounds" in lines[0]
    assert "Macro F1" in lines[1] and f"{result.test['macro_f1']:.3f}" in lines[2]
    assert lines[3].startswith("majority only")
    assert lines[4].startswith("warning: the model never predicts") and len(lines) == 5


def test_a_saved_result_is_a_run_folder(result: Result, federation: Federation, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "x")
    run = load_run(folder)
    assert run.finished and run.method_title == "FedCGNM" and len(run.history) == len(run.timings) == 3
    assert run.metric("macro_f1") == pytest.approx(result.test["macro_f1"])
    rows = federation.test.x[:7].numpy()
    probabilities = ft.load_model(folder).predict_proba(rows)
    np.testing.assert_array_equal(probabilities, result.model().predict_proba(rows))
    with pytest.raises(ft.FedtailError, match="already contains a run"):
        result.save(folder)


def test_the_report_is_one_page(result: Result, tmp_path: Path) -> None:
    with pytest.raises(ft.FedtailError, match="in memory only"):
        result.report()
    page = result.report(tmp_path / "mine.html")
    assert page == tmp_path / "mine.html" and "<html" in page.read_text(encoding="utf-8")
    assert result.report() == tmp_path / "mine" / "report.html"


@pytest.mark.parametrize("kind", ["curves", "classes"])
def test_figures_can_be_drawn(result: Result, kind: str, tmp_path: Path) -> None:
    result.plot(kind).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_an_unknown_figure_and_settings_without_effect_are_one_line(result: Result, federation: Federation) -> None:
    with pytest.raises(ft.FedtailError, match="plot 'curve' is unknown; did you mean 'curves'"):
        result.plot("curve")
    with pytest.raises(ft.FedtailError, match="folder has no effect in fit"):
        ft.fit(federation, rounds=1, folder="runs")
