"""``fedtail demo``: real rows, real sites, and figures that the pages repeat."""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.cli.demo import handwriting

ROOT = Path(__file__).parents[2]


def test_a_site_is_a_form_and_every_form_asks_for_the_same_digits() -> None:
    table, digits = handwriting(), load_digits().target
    forms = [digits[table["form"] == name] for name in sorted(table["form"].unique())]
    assert len(forms) == 14 and table["form"].is_monotonic_increasing
    first = list(forms[0])
    for form in forms:  # a few digits of some forms were never read
        assert 114 <= len(form) <= 130 and SequenceMatcher(None, first, list(form), autojunk=False).ratio() > 0.95
    assert ((table["digit"] == "eight") == (digits == 8)).all()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--out", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder, result.stdout


@pytest.mark.slow
def test_what_the_demo_prints_is_in_its_files_and_on_the_pages(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    rows = [line for line in printed.splitlines() if line.startswith((" form", " all forms", " taken"))]
    cells = np.array([line.split()[-4:] for line in rows[:-1]], dtype=int)
    assert len(cells) == 15 and (cells[:-1].sum(0) == cells[-1]).all()
    there, alone, together, pooled = cells[-1]
    (run,) = folder.glob("table-trees-*/result.json")
    confusion = np.array(json.loads(run.read_text())["confusion"])
    assert (confusion[0].sum(), confusion[0, 0]) == (there, together)
    assert alone < 0.5 * there < 0.8 * there < together and abs(together - pooled) <= 5
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(line.rstrip() in index for line in rows[-2:]), "docs/index.md shows other figures"
    told = f"Of {there} eights on 14 forms of real handwriting, each form alone finds {alone}, all together {together} "
    assert told in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.slow
def test_the_demo_ends_with_a_page_and_a_card_and_is_quick_again(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    (card,) = folder.glob("*/model-card.md")
    assert (folder / "report.html").is_file() and str(card) in printed.replace("\n", "")
    assert "| eight | 94 | 70 |" in card.read_text()
    before = (card.parent / "result.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, ["demo", "--out", str(folder)], catch_exceptions=False)
    assert again.exit_code == 0 and (card.parent / "result.json").stat().st_mtime_ns == before
