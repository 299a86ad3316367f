from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtail.plots import Rows
from fedtail.report import load_runs
from fedtail.report.comparison import comparisons
from fedtail.report.figures import FIGURES, write_figures

Writer = Callable[..., Path]


@pytest.mark.parametrize(("suffix", "magic"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_every_figure_is_written_and_the_same_twice(
    suffix: str, magic: bytes, comparison: list[Path], tmp_path: Path
) -> None:
    found = comparisons(load_runs(comparison))
    first = write_figures(found, tmp_path / "a", suffix)
    again = write_figures(found, tmp_path / "b", suffix)
    drawn = [name for name in FIGURES if name not in ("sites", "reliability", "pr")]  # for which runs need scores
    assert [p.stem for p in first] == drawn
    for one, two in zip(first, again, strict=True):
        assert one.read_bytes().startswith(magic)
        assert one.read_bytes() == two.read_bytes()


def test_figures_without_numbers_are_left_out(run_folder: Writer, tmp_path: Path) -> None:
    found = comparisons(load_runs([run_folder("a", label_map=False)]))
    names = {p.stem for p in write_figures(found, tmp_path / "figures", "svg")}
    assert "label-map" not in names and "rates" not in names
    assert "macro-f1" in names


def test_each_problem_has_its_own_folder(run_folder: Writer, tmp_path: Path) -> None:
    folders = [run_folder(f"a{a}", n_rounds=2, more={"data": {"alpha": a}}) for a in (0.1, 0.5)]
    written = write_figures(comparisons(load_runs(folders)), tmp_path / "figures", "svg")
    assert {p.parent.name for p in written} == {"problem-1", "problem-2"}


def test_rare_and_frequent_thirds_are_the_metrics_of_these_names(run_folder: Writer) -> None:
    (found,) = comparisons(load_runs([run_folder("a", n_classes=6), run_folder("b", seed=1, n_classes=6)]))
    runs = [json.loads((run.folder / "result.json").read_text()) for run in found.runs]
    chart = FIGURES["groups"](found, "macro_f1")
    assert isinstance(chart, Rows)
    drawn = dict(zip(chart.names, chart.series[0].values, strict=True))
    for name, key in (("rarest third", "tail"), ("most frequent third", "head")):
        assert drawn[name] == pytest.approx(sum(r["test"][key] for r in runs) / len(runs), abs=1e-9)
    assert drawn["most frequent third"] > drawn["rarest third"] + 0.05
    (two,) = comparisons(load_runs([run_folder("c", n_classes=2)]))
    assert not FIGURES["groups"](two, "macro_f1"), "of two classes the chart of each class says it"
