from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedtail.errors import FedtailError
from fedtail.report import load_run, load_runs, write_report
from fedtail.report.comparison import comparisons
from fedtail.report.figures import write_figures
from fedtail.report.page import PARTS
from fedtail.report.sections.federation import influences
from fedtail.report.tables import headline, to_csv, to_latex
from fedtail.rounds.history import influence_of
from fedtail.runs.record import FOLDER, AtSite, Yardstick

Writer = Callable[..., Path]


CELLS = ("td", "th")


class Balanced(HTMLParser):
    """Fails on elements that are closed in the wrong order; a cell ends with the next, or with its row."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in CELLS and self.open[-1] in CELLS:
            self.open.pop()
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr" and self.open[-1] in CELLS:
            self.open.pop()
        assert self.open.pop() == tag


def page(folders: list[Path], tmp_path: Path, title: str = "A title") -> str:
    return write_report(load_runs(folders), tmp_path / "out" / "report.html", title).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_asks_for_nothing_from_outside(comparison: list[Path], tmp_path: Path) -> None:
    html = page(comparison, tmp_path)
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    assert "default-src 'none'" in html
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)|url\(|@import|https?://""", html)


def test_every_part_is_there(run_folder: Writer, tmp_path: Path) -> None:
    options = {"scored": True, "outlier": 2, "refused": {3: "update is not finite"}}
    folders = [run_folder("a", **options), run_folder("b", method="fedcgnm", rates="fedhoo", **options)]
    Yardstick("pooled", 0, "a", {"macro_f1": 0.9}, 1.0).save(tmp_path / FOLDER / "pooled.json")
    html = page(folders, tmp_path)
    assert re.findall(r'<section id="(\w+)">', html) == [
        key for key, _, _ in PARTS if key != "columns"
    ]  # no trees here
    assert html.count("<figure") == html.count("<summary>Data table</summary>") >= 25
    assert html.count('role="img" tabindex="0"') == html.count("<figure")
    assert "reaches macro F1" in html and "search ends" in html and "V_T / √T" in html


def test_a_run_of_version_0_1_leaves_out_what_it_did_not_record(comparison: list[Path], tmp_path: Path) -> None:
    html = page(comparison, tmp_path)
    sections = re.findall(r'<section id="(\w+)">', html)
    assert sections == [k for k, _, _ in PARTS if k not in ("yardsticks", "sites", "columns", "decisions", "trouble")]
    assert html.count("<figure") >= 15


def _data(html: str, title: str) -> dict[str, Any]:
    """What the figure of that title hands to the page's script."""
    figure = next(f for f in html.split("<figure") if f"<figcaption>{title}</figcaption>" in f)
    found: dict[str, Any] = json.loads(
        figure.partition('<script type="application/json">')[2].partition("</script>")[0]
    )
    return found


def test_figures_show_what_result_json_has(run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", scored=True, outlier=2)
    html, result = page([folder], tmp_path), json.loads((folder / "result.json").read_text())
    lines = {line["name"][:7]: line for line in _data(html, "Precision and recall of each class")["series"]}
    for name, curve in result["curves"]["test"]["pr"].items():
        assert lines[name]["x"] == curve["recall"] and lines[name]["y"] == curve["precision"]
    assert next(iter(lines)) == "class 5", "rarest first"
    assert all(line["c"] for line in lines.values()), "none is grey"
    trade = _data(html, "Recall and precision of class 5 by threshold")
    assert sorted(trade["series"][0]["y"]) == pytest.approx(sorted(result["tradeoff"]["recall"]))
    names, drawn = ("before calibration", "calibrated"), _data(html, "Reliability")["series"]
    for name, line, key in zip(names, drawn, ("reliability_before", "reliability"), strict=True):
        bins = result["curves"]["test"][key]
        assert (line["name"], line["x"], line["y"]) == (name, bins["probability"], bins["accuracy"])
    worst = min(result["sites"], key=lambda site: site["validation"]["macro_f1"])
    assert f"The worst site is {worst['site']} with macro F1 {worst['validation']['macro_f1']:.3f}" in html
    shown = re.search(r'<table class="sortable heat">(.*?)</table>', html, re.S)
    assert shown is not None
    first = re.findall(r"<t[hd][^>]*>([^<]*)", shown[1].partition("<tbody>")[2].partition("</tr>")[0])
    recall = worst["validation"]["per_class_accuracy"][::-1]
    assert first[0] == worst["site"] and first[2] == str(worst["validation"]["per_class_support"][-1])
    assert first[4:10] == ["–" if v is None else f"{v:.2f}".lstrip("0") if 0 < v < 1 else f"{v:g}" for v in recall]
    before, after = (found["calibration_error"] for found in (result["before"], result["test"]))
    assert f"Calibration error {before:.3f} → {after:.3f}" in html


def test_over_several_seeds_the_worst_site_is_a_mean_and_single_figures_name_their_seed(
    run_folder: Writer, tmp_path: Path
) -> None:
    folders = [run_folder(f"s{seed}", scored=True, seed=seed) for seed in (3, 4)]
    found = [json.loads((folder / "result.json").read_text())["sites"] for folder in folders]
    worst = [min(site["validation"]["macro_f1"] for site in sites) for sites in found]
    assert worst[0] != worst[1]
    html = page(folders, tmp_path)
    tile = (
        f'<dt>macro F1 at the worst site</dt><dd class="big">{sum(worst) / 2:.3f}</dd><dd>mean of 2 seeds; in seed 3: '
    )
    assert tile in html
    assert "In seed 3, the worst site is " in html and f"with macro F1 {worst[0]:.3f}" in html


def test_the_page_and_the_status_call_the_same_sites_outliers(run_folder: Writer) -> None:
    for outlier in (None, 2):
        run = load_run(run_folder(f"o{outlier}", outlier=outlier))
        often = [{"client": 1, "reason": "late", "code": "timeout"}] * 1
        run.history[:] = [{**r, "refused": often} if r["round"] % 2 else r for r in run.history]
        told = influence_of(run.history, 4)
        assert [row["clients"] for row in influences(run) if row["stands_out"]] == told.get("outliers", [])


def test_a_site_that_stands_out_is_named_with_the_reason(run_folder: Writer, tmp_path: Path) -> None:
    html = page([run_folder("a", outlier=2)], tmp_path)
    assert "<b>site 2</b> stands out: far from the others in 12 of 12 rounds" in html and "(cosine -0.50)" in html
    assert html.count("stands out:") == 1
    quiet = [json.loads(line) for line in (tmp_path / "a" / "history.jsonl").read_text().splitlines()]
    for record in quiet:
        record["influence"]["flagged"] = []
    (tmp_path / "a" / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in quiet))
    assert "No site stands out" in page([tmp_path / "a"], tmp_path)


def test_what_the_search_did_is_folded_away_and_51_rates_are_all_named(run_folder: Writer, tmp_path: Path) -> None:
    html = page([run_folder("a", rates="fedhoo", n_clients=51)], tmp_path)
    rates = html.partition('<section id="rates">')[2].partition("</section>")[0]
    shown, _, folded = rates.partition('<details class="fold"><summary>Inside the search')
    assert "Nodes" in folded and "Depth" in folded and "Nodes" not in shown
    drawn = shown.partition("<details>")[0]
    assert all(f">site {k}</tspan>" in drawn for k in range(51)) and f">{0.4 + 0.05 * 50:.3f}</text>" in drawn


@pytest.mark.parametrize("n_classes", [3, 12, 60])
def test_no_class_name_is_dropped(n_classes: int, run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", n_classes=n_classes, scored=True)
    clients = json.loads((folder / "clients.json").read_text())
    names = [f"suspected serious injury, kind {c}" for c in range(n_classes)]
    (folder / "clients.json").write_text(json.dumps({**clients, "classes": names}))
    html = page([folder], tmp_path)
    for begin, end in (
        ("<figcaption>Recall", "<details>"),
        ('aria-label="FedAvg: confusion"', "</table>"),
    ):
        text = re.sub(r"</tspan><tspan[^>]*>", " ", html.partition(begin)[2].partition(end)[0])
        assert all(f">{n}<" in text for n in names), begin


def test_text_from_runs_cannot_inject_markup(run_folder: Writer, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = run_folder("a", method=evil, refused={2: evil}, more={"data": {"name": evil}})
    html = page([folder], tmp_path, title=evil)
    assert evil not in html
    assert html.count("<script>") == 1


def test_refusals_and_runs_cut_short_are_told(run_folder: Writer, tmp_path: Path) -> None:
    html = page([run_folder("a", n_rounds=4, asked=9, refused={2: "update is not finite"})], tmp_path)
    assert "stopped after 4 of 9 rounds" in html
    assert "update is not finite" in html and "missing or refused once" in html
    assert "What went wrong" not in page([run_folder("b")], tmp_path), "nothing did"


def test_a_real_federation_without_label_histograms_is_reported(run_folder: Writer, tmp_path: Path) -> None:
    html = page([run_folder("a", label_map=False, confusion=False)], tmp_path)
    assert "label histograms stay at the sites" in html
    assert '<section id="confusion">' not in html


def test_a_real_federations_report_names_sites_faults_traffic_and_what_they_kept(
    run_folder: Writer, tmp_path: Path
) -> None:
    folder = run_folder("a", label_map=False, confusion=False, refused={2: "no reply within 20 s"})
    clients = json.loads((folder / "clients.json").read_text())
    names = [f"hospital {k}" for k in range(len(clients["sizes"]))]
    (folder / "clients.json").write_text(json.dumps({**clients, "sites": names}))
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    records[1]["faults"] = [{"client": 1, "reason": "validate: not finite"}]
    for record in records:
        record["traffic"] = {"down": 3_000_000, "up": 1000, "exchanges": 2}
    (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    result = json.loads((folder / "result.json").read_text())
    result |= {"engine": {"engine": "flower", "path": "remote"}, "confusion": [[30, 40]]}
    result["test"] = {"accuracy": 0.75, "macro_f1": None}
    (folder / "result.json").write_text(json.dumps(result))
    html = page([folder], tmp_path)
    assert '<section id="confusion">' not in html, "totals are no confusion matrix"
    assert "revealed only totals" in html and "reaches accuracy 0.750" in html
    assert "missing or refused 2 times" in html and "<td>hospital 1<" in html and "validate: not finite" in html
    assert "3 MB to the sites and 1 kB back" in html and "in 2 exchanges" in html
    assert f"flower, {len(names)} sites" in html and "engine.path" not in html


def test_several_problems_are_kept_apart(run_folder: Writer, tmp_path: Path) -> None:
    folders = [run_folder(f"a{a}", more={"data": {"alpha": a}}) for a in (0.1, 0.5)]
    html = page(folders, tmp_path)
    assert [f'id="p{i}-results"' in html for i in range(2)] == [True, True]


def test_many_classes_and_clients_stay_a_small_page(run_folder: Writer, tmp_path: Path) -> None:
    html = page([run_folder("a", n_classes=100, n_clients=100, n_rounds=3)], tmp_path)
    assert len(html) < 1_500_000


def test_seven_methods_on_a_hundred_classes_stay_a_page_to_send(run_folder: Writer, tmp_path: Path) -> None:
    names = ["fedavg", "fedcgnm", "fedprox", "scaffold", "focal", "weighted_ce", "logit_adjustment"]
    folders = [run_folder(name, method=name, n_classes=100, n_clients=20, scored=True) for name in names]
    html = page(folders, tmp_path)
    assert len(html) < 1_200_000
    maps = re.findall(r'aria-label="[^"]*: confusion">(.*?)</table>', html, re.S)
    assert [table.count("<td") for table in maps] == [100 * 100] * 7


def test_of_more_methods_than_fit_some_are_left_out_and_the_page_says_where_their_numbers_are(
    run_folder: Writer, tmp_path: Path
) -> None:
    wrong = {"said": "It found nothing", "try": "lr=auto"}
    folders = [run_folder(f"m{i}", method=f"method {i}", rates="fedhoo", scored=True) for i in range(11)]
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps({**result, "verdict": wrong}))
    html = page(folders, tmp_path)
    parts = {key: html.partition(f'<section id="{key}">')[2].partition("</section>")[0] for key, _, _ in PARTS}
    for key, left, file in [
        ("results", "3 more runs", "result.json"),
        ("confusion", "3 more maps", "result.json"),
        ("rates", "3 more charts", "history.jsonl"),
        ("curves", "1 more chart", "history.jsonl"),
        ("decisions", "10 more metrics", "result.json"),
    ]:
        assert f"Left out: {left}; the numbers are in {file} in each run&#39;s folder." in parts[key], key
    assert parts["results"].count("It found nothing") == parts["confusion"].count("<table") == 8
    assert "Left out" not in page(folders[:1], tmp_path).partition('<section id="curves">')[0]
    many = [run_folder(f"c{i}", method=f"method {i}", n_classes=100, n_clients=20, scored=True) for i in range(3)]
    assert "Left out: 2 more maps; " in page(many, tmp_path).partition('<section id="sites">')[2]


def test_runs_on_data_of_several_seeds_have_a_dot_each_that_says_which(run_folder: Writer, tmp_path: Path) -> None:
    folders = [
        run_folder(f"{seed}-{data}", seed=seed, level=0.5 + 0.1 * data, more={"data": {"seed": data}})
        for seed in (0, 1)
        for data in (0, 1, 2)
    ]
    for data in (0, 1, 2):
        alone = AtSite("client 0", 9, 0.5, 0.4, 0.5)
        measured = Yardstick("alone", 0, f"0-{data}", {"macro_f1": 0.2 + 0.1 * data}, 1.0, (alone,))
        measured.save(tmp_path / FOLDER / f"alone-{data}.json")
    html = page(folders, tmp_path)
    for title, names in [
        ("Every seed: macro F1", [f"seed {seed}, data {data}" for seed in (0, 1) for data in (0, 1, 2)]),
        ("All on one scale: macro F1", [f"seed 0, data {data}" for data in (0, 1, 2)] * 2),
        ("Each site, alone and federated", [f"client 0, seed 0, data {data}" for data in (0, 1, 2)]),
    ]:
        figure = html.partition(f"<figcaption>{title}")[2].partition("</figure>")[0]
        found = re.findall(r"seed \d, data \d(?=: )|client 0, seed \d, data \d(?=\nalone)", figure)
        assert sorted(found) == sorted(names), title
    assert "seed 0, data" not in page(folders[::3], tmp_path), "one seed of the data tells nothing apart"


def test_of_many_clients_some_are_drawn_and_the_page_says_so(run_folder: Writer, tmp_path: Path) -> None:
    html = page([run_folder("a", n_classes=3, n_clients=5000, n_rounds=2)], tmp_path)
    assert "200 of 5,000 clients" in html and len(html) < 1_000_000


def test_a_single_round_and_two_classes_can_be_drawn(run_folder: Writer, tmp_path: Path) -> None:
    assert "<svg" in page([run_folder("a", n_rounds=1, n_classes=2, n_clients=1)], tmp_path)


def _without_metrics(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in r.items() if k not in ("test", "validation", "alignment")} for r in lines]
    (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))


def _with_nulls(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for record in lines:
        record["train_loss"] = None
        record["test"]["per_class_accuracy"][1] = None
        record["test"]["tail"] = None
    (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))


def _without_clients(folder: Path) -> None:
    (folder / "clients.json").unlink()
    (folder / "timings.csv").unlink()


@pytest.mark.parametrize("damage", [_without_metrics, _with_nulls, _without_clients])
@pytest.mark.filterwarnings("error")
def test_runs_with_little_in_them_are_still_reported(
    damage: Callable[[Path], None], run_folder: Writer, tmp_path: Path
) -> None:
    folders = [run_folder("a", n_rounds=4, asked=9), run_folder("b", method="fedcgnm", n_rounds=4)]
    damage(folders[0])
    assert page(folders, tmp_path).count("<section") >= 8
    found = comparisons(load_runs(folders))
    assert write_figures(found, tmp_path / "figures", "svg")
    assert to_latex([headline(p) for p in found]) and to_csv(found)


def test_no_runs_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="at least one run"):
        write_report([], tmp_path / "r.html", "x")


def test_a_run_without_test_samples_says_so_and_draws_nothing_empty(run_folder: Writer, tmp_path: Path) -> None:
    folder = run_folder("a", n_rounds=1, n_clients=1)
    for name in ("result.json", "history.jsonl"):
        about = json.loads((folder / name).read_text())
        kept = {k: v for k, v in about.items() if k not in ("test", "confusion", "floor")}
        (folder / name).write_text(json.dumps(kept) + "\n")
    html = page([folder], tmp_path)
    assert "No run was scored on test samples." in html and "Accuracy of each class" not in html
    assert "1 round<" in html and "1 client " in html
