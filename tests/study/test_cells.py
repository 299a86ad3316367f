"""A cell is what its result depends on: settings, and the files that they name."""

from __future__ import annotations

from pathlib import Path

from fedtail.runs.config import check_config, load_config
from fedtail.study.cells import Cell, Outcome, content, in_processes, run_cells

MINE = """
from dataclasses import dataclass
from fedtail.methods.base import Method

@dataclass(frozen=True)
class Mine(Method):
    def direction(self, step):
        return {sign} step.grads.sum(dim=-2), step.state
"""


def cell(folder: Path) -> Cell:
    return Cell("mine", load_config(None, ["run.rounds=1", "data.name=blobs"], {"method.name": f"{folder}/m.py:Mine"}))


def test_other_code_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for folder, sign in ((first, "+"), (second, "-")):
        folder.mkdir()
        (folder / "m.py").write_text(MINE.format(sign=sign))
    assert content(f"{first}/m.py:Mine") != content(f"{second}/m.py:Mine") != ""
    before = cell(first).digest
    (first / "m.py").write_text(MINE.format(sign="-"))
    assert cell(first).digest != before


def test_another_table_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"

    def digest(text: str) -> str:
        path.write_text(text)
        return Cell("t", check_config({"data": {"name": "table", "path": str(path), "label": "y"}})).digest

    one = digest("a,y\n1,b\n")
    assert digest("a,y\n2,b\n") != one
    assert digest("a,y\n1,b\n") == one, "what was there before is found again"


def test_a_file_that_changes_while_others_run_it_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MINE.format(sign="+"))
    made = cell(tmp_path)
    assert made.digest  # of the code as it is now
    (tmp_path / "m.py").write_text(MINE.format(sign="-"))
    (done,) = in_processes(1)([made], tmp_path / "runs")
    assert isinstance(done, Outcome) and "has changed since" in str(done.error)
    assert run_cells([made], tmp_path / "more")[0].error is None, "one by one, in this process"
