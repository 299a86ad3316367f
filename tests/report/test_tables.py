from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedtail.cli.tables import print_table
from fedtail.report import load_runs
from fedtail.report.blocks import environment
from fedtail.report.comparison import Comparison, comparisons
from fedtail.report.tables import Table, footnote, headline, summary, to_csv, to_latex, to_markdown

Writer = Callable[..., Path]


def shown(table: Table) -> str:
    """The headline table as the page has it."""
    macros: Any = environment().get_template("blocks.html").module
    return str(macros.blocks([table.block(table.most_telling())]))


@pytest.fixture
def compared(comparison: list[Path]) -> Comparison:
    return comparisons(load_runs(comparison))[0]


def test_a_cell_is_mean_and_sample_deviation_over_seeds(compared: Comparison) -> None:
    import statistics

    values = [r.metric("macro_f1") for r in compared.contenders[1].runs]
    row = headline(compared).rows[1]
    mean, spread = row.cells["macro_f1"]
    assert mean == pytest.approx(statistics.mean(values))
    assert spread == pytest.approx(statistics.stdev(values))


def test_the_baseline_is_not_compared_with_itself(compared: Comparison) -> None:
    base, other = headline(compared).rows
    assert base.versus is None
    assert other.versus is not None and other.versus.n == 3 and other.versus.difference > 0


def test_the_note_says_how_little_three_seeds_can_show(compared: Comparison) -> None:
    note = footnote(headline(compared))
    assert "paired t-test" in note and "cannot give p below 0.25" in note


def test_one_seed_claims_no_significance(run_folder: Writer) -> None:
    folders = [run_folder("a"), run_folder("b", method="fedcgnm", level=0.9)]
    (compared,) = comparisons(load_runs(folders))
    table = headline(compared)
    assert "significance cannot be tested" in footnote(table)
    assert "±" not in shown(table)
    assert "in one run" in summary(compared)


def test_the_summary_does_not_oversell_an_unclear_difference(run_folder: Writer) -> None:
    levels = {"fedavg": (0.70, 0.80, 0.75), "fedcgnm": (0.80, 0.72, 0.78)}
    folders = [run_folder(f"{m}{s}", method=m, seed=s, level=v[s]) for m, v in levels.items() for s in range(3)]
    assert "which includes zero" in summary(comparisons(load_runs(folders))[0])


def test_bold_is_what_a_test_tells_from_all_others_and_nothing_else(run_folder: Writer) -> None:
    levels = {"fedavg": (0.70, 0.71, 0.70), "fedcgnm": (0.90, 0.91, 0.90), "fedprox": (0.90, 0.89, 0.91)}
    folders = {
        m: [run_folder(f"{m}{s}", method=m, seed=s, level=v[s % 3]) for s in range(6)] for m, v in levels.items()
    }
    three = headline(comparisons(load_runs([*folders["fedavg"][:3], *folders["fedcgnm"][:3]]))[0])
    assert not any(three.winners.values()), "three seeds cannot show it, however far apart they are"
    clear = headline(comparisons(load_runs([*folders["fedavg"], *folders["fedcgnm"]]))[0])
    assert clear.winners["macro_f1"] == "FedCGNM" and 'class="best"' in shown(clear) and "Bold" in footnote(clear)
    assert "mathbf" in to_latex([clear])
    tied = headline(comparisons(load_runs([f for found in folders.values() for f in found]))[0])
    assert tied.winners["macro_f1"] is None, "two of three are alike"
    text = shown(tied) + to_latex([tied])
    assert "best" not in text and "mathbf" not in text and "Bold" not in footnote(tied)


def test_markdown_has_one_line_per_arm_and_the_floor(compared: Comparison) -> None:
    rows = [line for line in to_markdown([headline(compared)]).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 + 1
    assert len({line.count("|") for line in rows}) == 1
    assert re.search(r"\| FedCGNM \+ FedHOO \| 3 \| \d\.\d{3} ± \d\.\d{3} ", rows[3])


def test_latex_is_balanced_and_escapes_special_characters(compared: Comparison) -> None:
    text = to_latex([headline(compared)])
    assert text.count("\\begin{") == text.count("\\end{")
    body = text.split("\\midrule")[1].split("\\bottomrule")[0]
    assert len({line.count("&") for line in body.strip().splitlines()}) == 1
    assert not re.search(r"(?<!\\)%", text.split("\n", 1)[1])
    assert text.isascii()


def test_csv_has_one_line_per_run_with_full_precision(compared: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([compared]))))
    assert len(rows) == 6
    assert float(rows[4]["macro_f1"]) == pytest.approx(compared.contenders[1].runs[1].metric("macro_f1"), abs=1e-6)


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_table_fits_the_terminal(compared: Comparison, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    print_table(headline(compared), console)
    text = console.export_text()
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "Tail" in text and "Macro F1" in text
    assert ("Δ Macro F1" in text) == (width == 160)


def test_a_narrow_terminal_leaves_out_columns_and_cuts_neither_names_nor_numbers(run_folder: Writer) -> None:
    methods = ("fedavg", "logit_adjustment")
    folders = [run_folder(f"{m}{s}", method=m, seed=s, scored=True) for m in methods for s in range(2)]
    (compared,) = comparisons(load_runs(folders))
    console = Console(width=80, record=True, file=io.StringIO())
    print_table(headline(compared), console)
    text = console.export_text()
    assert "…" not in text and all(f" {one.label} " in text for one in compared.contenders)
    assert len(re.findall(r"\d\.\d{3} ± \d\.\d{3}", text)) % 2 == 0 and "Macro F1" in text


def test_runs_with_a_background_class_have_defect_columns_and_few_false_alarms_are_best(run_folder: Writer) -> None:
    folders = [run_folder(m, method=m, level=v, background=0) for m, v in (("fedavg", 0.6), ("fedcgnm", 0.9))]
    table = headline(comparisons(load_runs(folders))[0], "defect_score")
    score, alarms = "defect_score", "false_alarm_rate"
    worse, better = table.rows
    assert better.cells[score][0] > worse.cells[score][0] and better.cells[alarms][0] < worse.cells[alarms][0]
    assert not any(table.winners.values()), "one seed shows nothing"
    assert "Defect score" in to_markdown([table]) and "False alarms" in shown(table)


def test_runs_without_one_have_no_such_columns(compared: Comparison) -> None:
    assert not {"defect_score", "false_alarm_rate"} & set(headline(compared).columns)
