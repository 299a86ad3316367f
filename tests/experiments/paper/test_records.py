from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.study.cells import Cell, Outcome
from fedtail_experiments.paper.declared import load_grid
from fedtail_experiments.paper.page import MARK, below_floor, filled, listed, table
from fedtail_experiments.paper.recipes import load_toml
from fedtail_experiments.paper.records import FOLDER, Record, append, read_records, recorder
from fedtail_experiments.paper.search import TRIALS, read_trials
from fedtail_experiments.paper.studies import FILE as STUDIES
from fedtail_experiments.paper.studies import read_studies
from fedtail_experiments.paper.summaries import summarize

ROOT = Path(__file__).parents[3]


def run(row: str, seed: int, value: float, **more: object) -> Record:
    given = {"grid": "table-iid", "block": "K=5", "column": "Adult-10", "row": row, "seed": seed}
    return Record(**{**given, "metrics": {"weighted_f1": value}, "digest": f"{row}{seed}", **more})  # type: ignore[arg-type]


# -- the page of this repository ------------------------------------------------------------------------------


def test_the_tables_of_the_results_page_are_what_the_records_give() -> None:
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert MARK.findall(page)
    results = ROOT / "results"
    assert page == filled(
        page, read_records(results / FOLDER), read_trials(results / TRIALS), read_studies(results / STUDIES)
    ), "run `fedtail reproduce page`"


def test_every_record_of_this_repository_stands_in_a_declared_grid() -> None:
    for record in read_records(ROOT / "results" / FOLDER):
        grid = load_grid(record.grid)
        assert record.block in {b.name for b in grid.blocks}, record
        assert record.column in {c.name for c in grid.columns}, record
        assert record.row in {r.name for r in grid.rows}, record
        assert record.metrics and all(math.isfinite(v) for v in record.metrics.values())
        assert record.commit


def test_every_table_that_is_declared_has_a_grid() -> None:
    for view in load_toml("page.toml").values():
        for part in view.get("parts", view.get("targets", [view] if "grid" in view else [])):
            grid = load_grid(part["grid"])
            columns, blocks, rows = ({axis.name for axis in axes} for axes in (grid.columns, grid.blocks, grid.rows))
            assert {*part.get("columns", []), part.get("column")} - {None} <= columns
            assert {*part.get("blocks", []), part.get("block")} - {None} <= blocks
            assert {part.get("row"), part.get("against")} - {None} <= rows


# -- records --------------------------------------------------------------------------------------------------


def test_a_line_has_what_is_known_and_is_read_back(tmp_path: Path) -> None:
    records = [run("FedAvg + U", 0, 0.9, changed={"local.lr": 0.4}, seconds=3.0), run("FedAvg + U", 1, 0.8)]
    elsewhere = replace(records[0], grid="chips")
    append(tmp_path / FOLDER, [*records, elsewhere])
    assert sorted(f.name for f in (tmp_path / FOLDER).iterdir()) == ["chips.jsonl", "table-iid.jsonl"]
    first = json.loads((tmp_path / FOLDER / "table-iid.jsonl").read_text().splitlines()[0])
    assert first["changed"] == {"local.lr": 0.4}
    assert "spread" not in first and "source" not in first and "seeds" not in first
    other, *again = read_records(tmp_path / FOLDER)
    assert other == elsewhere
    assert [r.metrics for r in again] == [r.metrics for r in records] and math.isnan(again[1].seconds)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"grid": "x"}\n')
    with pytest.raises(FedtailError, match=r"x\.jsonl, line 1, is not a record"):
        read_records(tmp_path)


def test_a_finished_cell_is_recorded_once_with_what_differs_from_the_recipe(tmp_path: Path) -> None:
    grid = load_grid("table-iid")
    plain = dict(grid.cells("cpu", [0], ["Adult-10", "K=5", "FedAvg"]))
    tuned: dict = dict(grid.cells("cpu", [0], ["Adult-10", "K=5", "FedAvg"], tuned=True))
    (place,), (cell,) = tuned, tuned.values()
    result: dict = {"test": {"weighted_f1": 0.9123456, "per_class_f1": [1.0]}, "floor": {"weighted_f1": 0.866}}
    result["validation"] = {"accuracy": 0.9, "macro_f1": 0.7, "brier": 0.1}
    (tmp_path / "result.json").write_text(json.dumps({**result, "seconds": 2.0, "hardware": {"machine": "x86_64"}}))
    for _ in range(2):
        note = recorder(tmp_path / FOLDER, grid.name, tuned, {place: plain[place].config}, {})
        note(Outcome(cell, tmp_path))
        note(Outcome(cell, tmp_path, error="out of memory"))
    (record,) = read_records(tmp_path / FOLDER)
    assert record.metrics == {"weighted_f1": 0.91235} and record.floor == {"weighted_f1": 0.866}
    assert record.validation == {"accuracy": 0.9, "macro_f1": 0.7}, "what settings may be chosen by, no more"
    assert record.changed == load_toml("tuned.toml")["adult"]["fedavg"], "all of it differs from the recipe"
    assert (record.seed, record.digest, record.hardware) == (0, cell.digest, "x86_64")
    assert isinstance(cell, Cell) and record.commit


# -- tables ---------------------------------------------------------------------------------------------------


def test_a_cell_is_the_mean_of_its_runs_the_last_of_each_seed_and_of_no_changed_ones() -> None:
    found = summarize(
        [
            run("FedAvg + U", 0, 0.5),
            run("FedAvg + U", 0, 0.9),
            run("FedAvg + U", 1, 0.8),
            run("FedAvg + U", 2, 0.1, overrides={"local.lr": 0.01}),
            Record(**{**run("FedAvg + U", 0, 0.2).__dict__, "seed": None, "seeds": 9, "source": "earlier"}),
        ],
        "weighted_f1",
    )
    assert found is not None
    assert (found.mean, found.seeds, found.imported) == (pytest.approx(0.85), 2, False)
    assert found.spread == pytest.approx(0.1 / 2**0.5)


def test_a_cell_with_a_run_from_before_there_were_records_is_marked() -> None:
    runs = [run("FedAvg + U", 0, 0.9, source="RESULTS.md, version 0.1"), run("FedAvg + U", 1, 0.8)]
    assert "×2†" in table("adult-iid-5", runs)
    assert "†" not in table("adult-iid-5", runs[1:])


def test_p_values_are_corrected_over_all_tests_of_a_table() -> None:
    records = [run("FedAvg + U", s, v) for s, v in enumerate((0.90, 0.91, 0.92))]
    records += [run("FedProx + U", s, v) for s, v in enumerate((0.89, 0.91, 0.90))]  # alone: p .225
    records += [run("CLIMB + U", s, v) for s, v in enumerate((0.90, 0.93, 0.93))]
    line = next(line for line in table("adult-iid-5", records).splitlines() if "FedProx" in line)
    assert "(−.010, p .451)" in line  # the smaller of two, so twice


def test_a_table_has_seeds_spread_paired_test_and_rank_agreement() -> None:
    values = {"FedAvg + U": (0.90, 0.91, 0.92), "FedProx + U": (0.89, 0.91, 0.90), "FedCGNM + U": (0.91, 0.92, 0.93)}
    records = [run(row, s, v) for row, each in values.items() for s, v in enumerate(each)]
    records.append(run("CLIMB + U", 0, 0.95))
    text = table("adult-iid-5", records)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines()}
    assert "| .910 ± .010 ×3 [.9038] |" in lines["FedAvg + U"]
    assert "(−.010, p .225)" in lines["FedProx + U"]  # differences -.01, 0, -.02: t = 1.732 with 2 degrees of freedom
    assert "(+.010, p –)" in lines["FedCGNM + U"]  # the same at every seed: no t-test
    assert "**.920 ± .010**" in lines["FedCGNM + U"]
    assert "| .950 ×1 [.9052] |" in lines["CLIMB + U"], "one seed is not the best of a column with three"
    # ours: CLIMB > FedCGNM > FedAvg > FedProx, the paper has .9052 .9136 .9038 .9052: 3 pairs agree, 2 do not, 1 ties
    tau = lines["*rank agreement with the paper (Kendall's tau)*"]
    assert "+.18 over 4 rows" in tau


def test_rows_are_compared_under_the_seeds_that_all_of_them_have() -> None:
    """A hard seed that only one of two rows has had says nothing of the rows."""
    easy = [run("FedAvg + U", 0, 0.90), run("FedCGNM + U", 0, 0.91), run("CLIMB + U", 0, 0.89)]
    page = table("columns", [*easy, run("FedCGNM + U", 1, 0.5)])
    (told,) = [line for line in page.splitlines() if "Adult-10" in line]
    assert told.startswith("| IID, Adult-10, K=5 | 3 / 4 | ") and " | +.010 ×1 | " in told
    assert told.split(" | ")[2] == table("columns", easy).splitlines()[2].split(" | ")[2], "the order of rows, too"


def test_single_runs_are_listed_with_what_was_changed_and_their_validation_where_it_is_known() -> None:
    view = {
        "grid": "table-iid",
        "where": {"column": "Adult-10"},
        "metrics": ["weighted_f1"],
        "validation": ["macro_f1"],
    }
    runs = [
        run("FedAvg + U", 0, 0.9, overrides={"local.lr": 0.4}, validation={"macro_f1": 0.7}, seconds=2.0),
        run("FedAvg + U", 0, 0.8, overrides={"local.lr": 0.2}),
        run("FedAvg + U", 1, 0.6, overrides={"local.lr": 0.2}),
        run("FedAvg + U", 0, 0.7),
    ]
    _, _, first, second, third = listed(view, runs).splitlines()
    assert first == "| FedAvg + U | lr 0.4 | .900 | .700 | 2 s |"
    assert second == "| FedAvg + U | lr 0.2 | .800 | – |  |"
    assert third == "| FedAvg + U | lr 0.2, seed 1 | .600 | – |  |"


def test_a_cell_below_the_majority_class_is_marked_and_named() -> None:
    floor = {"weighted_f1": 0.866}
    records = [run("FedAvg + U", s, 0.91, floor=floor) for s in range(2)]
    records += [run("Weighted CE + U", s, v, floor=floor) for s, v in enumerate((0.80, 0.90))]
    records += [run("CLIMB + U", 0, 0.85)]  # it knows no floor of its own: the column's
    records += [run("Fed-GraB + U", 0, 0.5, floor=floor, source="version 0.1")]
    text = table("adult-iid-5", records)
    marked = [line.split("|")[1].strip() for line in text.splitlines() if "‡" in line]
    assert marked == ["Weighted CE + U", "CLIMB + U", "Fed-GraB + U"]
    told = below_floor("adult-iid-5", records)
    assert told == [
        "adult-iid-5: Weighted CE + U, Adult-10, K=5: .850 is below .866",
        "adult-iid-5: CLIMB + U, Adult-10, K=5: .850 is below .866",
    ]


def test_targets_have_the_recipes_figure_over_seeds_and_the_best_reading_of_the_first() -> None:
    def of(row: str, value: float, seed: int = 0, **overrides: object) -> Record:
        return run(row, seed, value, column="C10-100", metrics={"macro_f1": value}, overrides=overrides)

    records = [of("FedCGNM + U", 0.70), of("FedAvg + U", 0.64), of("FedCGNM + U", 0.71, **{"local.lr": 0.3})]
    records += [of("FedCGNM + U", 0.66, **{"run.rounds": 9}), of("FedAvg + U", 0.58, **{"run.rounds": 9})]
    text = table("targets", records)
    ours = "| FedCGNM, C10-100, IID | .700 ×1 | .743 (−.043) | .711 (−.011) | – | .710 (lr 0.3; of 2; 1 shorter) |"
    assert ours in text
    lead = "| … − FedAvg | +.060 ×1 | +.125 (−.066) | +.093 (−.033) | – | +.060 (the recipe; of 1; 1 shorter) |"
    assert lead in text, "of full length"
    assert "C10-20" not in text, "nothing is told of what was not run"
    (line,) = [line for line in table("columns", records).splitlines() if "C10-100" in line]
    assert line == "| IID, C10-100, K=5 | 2 / 2 | – | +.060 ×1 | +.125 |"
    records += [of("FedCGNM + U", 0.68, 1), of("FedAvg + U", 0.60, 1), of("FedCGNM + U", 0.9, 2)]
    more = table("targets", records)
    assert "| FedCGNM, C10-100, IID | .760 ± .122 ×3 | .743 (+.017) | .711 (+.049) | – | .710 (lr 0.3" in more
    assert "| … − FedAvg | +.070 ± .014 ×2 | +.125 (−.055) | +.093 (−.023) | – | +.060 (the recipe; of 1" in more
    assert "| *in all* | 2 / 5 |" in table("columns", records)
    later = table("targets", [of("FedCGNM + U", 0.68, 1)])
    assert "| FedCGNM, C10-100, IID | .680 ×1 | .743 (−.063) | .711 (−.031) | – | – |" in later, (
        "seed 0 compares readings"
    )
    grid = {"local.lr": 0.4, "method.weight_decay": 0.001}
    inside = table("targets", [of("FedCGNM + U", 0.6, 0, **grid), of("FedCGNM + U", 0.7, 1, **grid)])
    assert "| FedCGNM, C10-100, IID | – | .743 | .711 | .650 ± .071 ×2 | .600 (lr 0.4" in inside


def test_cells_beside_the_papers_are_those_of_its_own_ablation() -> None:
    at_20 = table("targets", [run("FedCGNM + U", 0, 0.83, column="C10-20", metrics={"macro_f1": 0.83})])
    assert "| .857 (−.027) | .837 to .843 (−.010) |" in at_20
    dirichlet = run("FedCGNM + U", 0, 0.8, column="C10-20", metrics={"macro_f1": 0.8}, grid="table-noniid")
    assert "| .832 (−.032) | – |" in table("targets", [dirichlet]), "the paper has no ablation there"


def test_every_claim_of_the_results_page_names_runs_that_are_recorded() -> None:
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    claims = text.partition("| the paper says |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(claims) > 12
    headings = {
        "-".join(re.sub(r"[^\w -]", "", line[3:].lower()).split()) for line in text.splitlines() if line[:3] == "## "
    }
    for line in claims:
        runs = line.strip("| ").split(" | ")[-1]
        names, links = re.findall(r"`([\w-]+)`", runs), re.findall(r"\(#([\w-]+)\)", runs)
        assert names and links, line
        for name in names:
            files = (f"results/records/{name}.jsonl", f"results/{name}.jsonl")
            assert name == "convergence" or any((ROOT / file).is_file() for file in files), name
        assert set(links) <= headings, set(links) - headings


def test_the_page_needs_a_page_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = CliRunner().invoke(app, ["reproduce", "page"])
    assert asked.exit_code != 0 and "RESULTS.md" in str(asked.exception or asked.output)
    Path("RESULTS.md").write_text("# R\n\n<!-- table adult-iid-5 -->\n<!-- end -->\n\nProse.\n")
    asked = CliRunner().invoke(app, ["reproduce", "page"])
    assert asked.exit_code != 0 and "no records" in str(asked.exception or asked.output)
    append(Path("results") / FOLDER, [run("FedAvg + U", 0, 0.9)])
    asked = CliRunner().invoke(app, ["reproduce", "page"])
    assert asked.exit_code == 0 and "wrote 1 tables" in asked.output
    assert Path("RESULTS.md").read_text() == (
        "# R\n\n<!-- table adult-iid-5 -->\n| Weighted F1 | Adult-10 |\n|---|---|\n"
        "| FedAvg + U | **.900** ×1 [.9038] |\n<!-- end -->\n\nProse.\n"
    )
