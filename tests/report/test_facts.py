"""What a report says in counts and sentences, and what it does not claim."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtail.core.evidence import area_interval
from fedtail.core.metrics import shown, summarize
from fedtail.report import load_run, load_runs, write_report, write_run_report
from fedtail.report.blocks import Table, say
from fedtail.report.comparison import comparisons
from fedtail.report.facts import at_sites, found_and_missed, in_short
from fedtail.report.sections.classes import class_table, confusion
from fedtail.report.sections.sites import site_table
from fedtail.runs.record import FOLDER, AtSite, Yardstick

Writer = Callable[..., Path]


def page(folders: list[Path], tmp_path: Path) -> str:
    return write_report(load_runs(folders), tmp_path / "r.html", "t").read_text(encoding="utf-8")


def changed(folder: Path, change: Callable[[dict[str, Any]], None], name: str = "result.json") -> Path:
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))
    return folder


def test_what_is_found_and_missed_of_the_rarest_class_is_said_in_counts(run_folder: Writer) -> None:
    run = load_run(run_folder("a"))
    assert run.confusion is not None
    hit, support, said = int(run.confusion[5, 5]), int(run.confusion[5].sum()), int(run.confusion[:, 5].sum())
    (one,) = found_and_missed(run)
    assert (one.name, one.support, one.found, one.false_alarms) == ("class 5", support, hit, said - hit)
    assert str(one).startswith(f"Of {support} test cases of class 5 it finds {hit}, with ")
    text = in_short(comparisons([run])[0])
    assert f"Of {support} cases of class 5, the rarest of 6 classes, it finds {hit}" in text
    assert f"is right in {hit} of them" in text


def test_a_rare_class_without_test_samples_is_named_and_has_no_share_but_its_false_alarms(run_folder: Writer) -> None:
    def untest(result: dict[str, Any]) -> None:
        table, test = np.array(result["test"]["confusion"]), result["test"]
        table[5] = 0
        table[0, 4:] = 7, 3  # class 5 is answered three times, in vain
        test |= summarize(table)
        test["per_class_support"], test["confusion"] = table.sum(1).tolist(), table.tolist()

    run = load_run(changed(run_folder("a", scored=True), untest))
    (comparison,) = comparisons([run])
    text = in_short(comparison)
    assert "cases of class 4, the rarest class that was tested, it finds" in text
    assert "There are no test samples of class 5, so nothing is known of how much of that is found." in text
    table = class_table(comparison, run)
    row = {name: str(cell).strip() for name, cell in zip(table.head, table.rows[0], strict=True)}
    assert [row[name] for name in ("Class", "Test", "Found", "Missed", "False alarms", "Recall", "F1")] == [
        "class 5", "0", "0", "0", "3", "–", "–"
    ]  # fmt: skip
    shares = next(block for block in confusion(comparison, "macro_f1") if isinstance(block, Table))
    assert {str(cell).strip() for cell in shares.rows[0][1:]} == {"–"}


def test_the_class_of_the_column_beside_sites_is_one_that_sites_have(run_folder: Writer) -> None:
    def without(result: dict[str, Any]) -> None:
        for site in result["sites"]:
            for split in ("test", "validation"):
                if split in site:
                    site[split]["per_class_support"][5] = 0

    rows = site_table(load_run(changed(run_folder("a", scored=True), without)))
    assert "of class 4" in rows.head and "of class 5" not in rows.head


def test_of_a_class_that_is_never_answered_there_is_no_precision(run_folder: Writer) -> None:
    def silent(result: dict[str, Any]) -> None:
        table = np.array(result["test"]["confusion"])
        table[:, 3] = 0
        result["test"] |= {"confusion": table.tolist(), "per_class_precision": [0.5, 0.5, 0.5, 0.0, 0.5, 0.5]}

    precision = load_run(changed(run_folder("a", scored=True), silent)).per_class("precision")
    assert np.isnan(precision).tolist() == [False, False, False, True, False, False]


def test_a_report_opens_with_what_sites_gain_on_their_own_rows_by_the_method_it_was_measured_for(
    run_folder: Writer, tmp_path: Path
) -> None:
    folders = [run_folder("a"), run_folder("b", method="fedcgnm", level=0.9)]
    sites = (AtSite("x", 10, 0.5, 0.5, 0.75), AtSite("y", 10, 0.5, 0.5, 0.25), AtSite("z", 10, 0.5, 0.5, 0.75))
    Yardstick("alone", 0, "a", {"macro_f1": 0.5}, 1.0, sites).save(tmp_path / FOLDER / "alone.json")
    html = page(folders, tmp_path)
    first = re.sub(r"<[^>]+>", "", html.partition("</h2>")[2].partition("</p>")[0]).strip()
    assert first.startswith("On their own rows, 2 of 3 sites do better with FedAvg than alone: +0.083")
    assert "from -0.250 (y) to +0.250" in first
    assert set(re.findall(r"\d of \d sites", html)) == {"2 of 3 sites"}


def test_thresholds_are_not_drawn_from_a_handful_of_positives(run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", scored=True)
    assert "Recall and precision of class 5 by threshold" in page([folder], tmp_path)
    changed(folder, lambda found: found["tradeoff"].update(support=9))
    html = page([folder], tmp_path)
    assert "by threshold" not in html and "9 validation samples of class 5: too few" in html


def test_only_what_was_calibrated_is_called_so(run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", scored=True)
    assert "before calibration" in page([folder], tmp_path)
    changed(folder, lambda found: found.update(decision={"find": "class 5", "threshold": 0.05}))
    html = page([folder], tmp_path)
    assert "calibrated" not in html and "before calibration" not in html


def test_rates_that_a_search_left_alone_are_not_called_fixed(run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", rates="fedhoo")
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    still = [{**record, "rates": lines[-1]["rates"]} for record in lines]
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in still))
    html = page([folder], tmp_path)
    assert "The search left the resampling rates as they were." in html and "were fixed" not in html
    fixed = page([run_folder("b")], tmp_path)
    assert "were fixed" in fixed and "Search rounds" not in fixed and "V_T" not in fixed


def test_a_site_with_one_class_alone_has_no_f1_and_is_not_the_best(run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", n_classes=2)
    sites = [
        {"site": "both", "test": {"macro_f1": 0.6, "per_class_support": [20, 3], "rare_pr_auc": 0.4}},
        {"site": "none", "test": {"macro_f1": 1.0, "per_class_support": [20, 0], "rare_pr_auc": None}},
        {"site": "few", "test": {"macro_f1": 0.5, "per_class_support": [20, 1], "rare_pr_auc": 1.0}},
    ]
    changed(folder, lambda found: found.update(sites=sites))
    _, rows = at_sites(load_run(folder))
    assert [row.name for row in rows] == ["few", "both", "none"] and [row.positives(1) for row in rows] == [1, 3, 0]
    html = page([folder], tmp_path)
    assert "The worst site is few with macro F1 0.500; 2 sites have 0.550" in html
    assert "1 site with samples of one class alone cannot tell" in html
    alone = {"seed": None, "words": "macro F1", "mean": 0.5, "spread": 0.0, "small": 30, "large": [], "untold": 1}
    said = say("worst_site", rows=rows[:1], split="test", **alone)
    assert said.startswith(
        "The worst site is few with macro F1 0.500, the only one that can tell, on its own test set. 1 "
    )


def test_of_two_classes_the_area_is_that_of_the_rare_one(run_folder: Writer, tmp_path: Path) -> None:
    run = load_run(run_folder("a", n_classes=2, scored=True))
    assert run.metric("rare_pr_auc") == run.per_class("pr_auc")[1] != run.metric("pr_auc")
    assert "pr_auc" not in [metric.name for metric in shown(run.test)], "nor in the terminal"
    table = page([run.folder], tmp_path).partition('class="headline"')[2].partition("</thead>")[0]
    assert "PR-AUC, rarest" in table and ">PR-AUC<" not in table


@pytest.mark.parametrize(("area", "n"), [(0.5, 10), (0.9, 48), (1.0, 3), (0.0, 3)])
def test_the_interval_of_an_area_holds_it_and_narrows_with_positives(area: float, n: int) -> None:
    low, high = area_interval(area, n)
    wider = area_interval(area, max(n // 4, 2))
    assert 0 <= low <= area <= high <= 1 and wider[1] - wider[0] > high - low > 0
    assert area_interval(area, 0) == (0.0, 1.0)


def test_a_page_says_how_to_get_the_same_again(run_folder: Writer, tmp_path: Path) -> None:
    made = {"date": "2026-01-02 03:04 UTC", "version": "9.9", "command": "fedtail run --x <b>", "commit": "abc123"}
    folder = changed(run_folder("a"), lambda found: found.update(made=made, digest="d1g35t"), "clients.json")
    html = page([folder], tmp_path)
    assert all(text in html for text in ("2026-01-02", "9.9", "fedtail run --x &lt;b&gt;", "abc123", "d1g35t"))
    card = (write_run_report(folder).parent / "model-card.md").read_text()
    assert all(text in card for text in ("2026-01-02 03:04 UTC", "9.9", "fedtail run --x &lt;b>", "abc123", "d1g35t"))


def test_a_model_card_has_every_class_in_counts_and_names_what_is_uncertain(run_folder: Writer) -> None:
    folder = run_folder("a", scored=True)
    card = (write_run_report(folder).parent / "model-card.md").read_text()
    run = load_run(folder)
    rows = [line for line in card.splitlines() if line.startswith("| class ")]
    assert run.confusion is not None and [row.split(" | ")[0] for row in rows[:6]] == [
        f"| class {c}" for c in (5, 4, 3, 2, 1, 0)
    ]
    hits = int(run.confusion[5, 5])
    assert f"| {hits} | {int(run.confusion[5].sum()) - hits} |" in rows[0]
    assert "their numbers are uncertain" in card and "fedtail predict FILE --run" in card


def test_a_loss_axis_does_not_reach_below_zero_and_the_headline_fits_the_screen(
    comparison: list[Path], tmp_path: Path
) -> None:
    for seed, folder in enumerate(comparison):  # seeds so far apart that mean - spread is below zero
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        wide = [{**record, "train_loss": 9.0 * (seed % 3 == 0) + 0.01} for record in lines]
        (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in wide))
    html = page(comparison, tmp_path)
    loss = next(f for f in html.split("<figure") if "<figcaption>Training loss</figcaption>" in f)
    data = json.loads(loss.partition('<script type="application/json">')[2].partition("</script>")[0])
    assert data["y"][0] == 0
    head = html.partition('class="sortable headline"')[2].partition("</thead>")[0]
    assert 5 <= head.count("<th scope") <= 9
