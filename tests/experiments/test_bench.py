"""The suite: as many trials for all, ranks with intervals, submissions that are computed anew."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.methods import METHODS
from fedtail.runs.config import check_config
from fedtail.study.cells import Cell, run_cells
from fedtail.study.compare import validation_score
from fedtail_experiments.bench.leaderboard import rank_submissions, to_markdown, write_board
from fedtail_experiments.bench.running import (
    Row,
    Submission,
    bench_method,
    gather,
    points,
    read_submission,
    trials_of,
    verify,
)
from fedtail_experiments.bench.suite import MEASURES, Set, Suite, load_suite, measured
from fedtail_experiments.cli.bench import print_board, runner, submissions
from fedtail_experiments.paper.grid import layered
from fedtail_experiments.paper.search import search_space

SMALL = Suite(
    version=2,
    seeds=2,
    share=1.0,
    tuning_seeds=(1000, 1001),
    grid={"local.lr": [0.2, 0.1], "method.weight_decay": [1e-3, 1e-4]},
    own={},
    sets=(
        Set(
            name="blobs",
            title="Blobs",
            kind="table",
            settings={
                "data.name": "blobs",
                "data.n_max": 120,
                "run.metric": "macro_f1",
                "run.rounds": 4,
                "local.lr": 0.1,
            },
        ),
    ),
)
MINE = """
from dataclasses import dataclass

from fedtail.methods.base import LocalStep, Method


@dataclass(frozen=True)
class Mine(Method):
    title = "Mine"
    paper = "Me, 2026"

    def direction(self, step: LocalStep):
        return 0.05 * step.grads.sum(dim=-2).sign(), step.state
"""


def test_the_suite_is_declared_well() -> None:
    suite = load_suite()
    assert {s.kind for s in suite.sets} == {"table", "image"}
    for one in suite.sets:
        config = check_config(layered([one.settings, {"method.name": "fedavg"}, {"run.seed": 3}]))
        assert config.data_seed == 3 and config.run.metric == "macro_f1"  # a seed draws the split too
    assert [s.name for s in suite.only(["table"])] == ["adult", "unsw", "flights"]
    by_name = {s.name for s in suite.sets if s.by_name}
    assert by_name == {s.name for s in suite.sets if s.settings.get("engine.device") == "cuda"} == {"cifar10-lt100"}
    assert not by_name & {s.name for s in (*suite.only([]), *suite.only(["image"]))}
    assert [s.name for s in suite.only(["cifar10-lt100", "table"])][-1] == "cifar10-lt100"
    with pytest.raises(FedtailError, match="--only"):
        suite.only(["mnist"])


def test_every_method_tries_the_same_share_of_its_grid_and_fedcgnm_s_has_fedcgn_s_in_it() -> None:
    suite, adult = load_suite(), load_suite().sets[0]
    drawn = {name: trials_of(suite, adult, name) for name in METHODS}
    assert {name: len(field) for name, field in drawn.items()}.items() >= {
        ("fedavg", 5),
        ("fedcgn", 9),
        ("fedcgnm", 27),
    }
    for name, field in drawn.items():
        assert len({tuple(point.items()) for point in field}) == len(field), name  # none twice
        size = len(points(suite.grid)) * len(points(suite.own.get(name) or search_space(name).own))
        assert len(field) == math.ceil(suite.share * size)
        first = [{key: point[key] for key in suite.grid} for point in field[:5]]
        assert first == drawn["fedavg"], name  # the same learning rates and decays, in the same order
    whole = replace(suite, share=1.0)
    normalized, momentum = (trials_of(whole, adult, name) for name in ("fedcgn", "fedcgnm"))
    assert all({**point, "method.beta": 0.0} in momentum for point in normalized)


def test_what_is_measured_of_a_run() -> None:
    test = {"macro_f1": 0.5, "per_class_accuracy": [0.9, 0.2, 0.4], "per_class_pr_auc": [1.0, 0.3, None]}
    result = {"test": test, "rates": [0.6] * 5, "rounds": 10, "seconds": 3.0, "worst": {"value": 0.25}}
    values = measured(result, [100, 3, 20], 4000)
    assert values["tail_recall"] == 0.2 and values["tail_pr_auc"] == 0.3 and values["worst_site"] == 0.25
    assert values["megabytes"] == pytest.approx(2 * 5 * 10 * 4000 / 1e6)
    assert np.isnan(values["calibration_error"]) and set(values) == set(MEASURES)


def test_a_method_of_ones_own_enters_and_its_submission_is_verified(tmp_path: Path) -> None:
    (tmp_path / "my_method.py").write_text(MINE)
    run = runner(tmp_path / "bench", 1)
    done = bench_method(SMALL, f"{tmp_path}/my_method.py:Mine", SMALL.sets, 2, tmp_path / "bench", run)
    bench_method(SMALL, "fedavg", SMALL.sets, 2, tmp_path / "bench", run)
    assert [r.seed for r in done.rows] == [0, 1]
    finals = [t for t in done.trials["blobs"] if t["rounds"] == 4]
    assert {t["seeds"] for t in done.trials["blobs"]} == {2}  # every score is a mean over the tuning seeds
    assert len(done.trials["blobs"]) == 4 + 2 + 1 and done.chosen["blobs"] == finals[0]["settings"]

    folder = tmp_path / "bench" / "submissions" / "mine"
    assert (folder / "my_method.py").is_file()
    (tmp_path / "my_method.py").unlink()  # the submission has all it needs
    checked = verify(SMALL, folder, runner(tmp_path / "anew", 1), sample=1)
    assert [c.verdict for c in checked] == ["same bits"]

    told = json.loads((folder / "submission.json").read_text())
    told["rows"][0]["values"]["macro_f1"] += 0.05
    (folder / "submission.json").write_text(json.dumps(told))
    again = verify(SMALL, folder, runner(tmp_path / "anew", 1), sample=1)
    assert [c.verdict for c in again] == ["differs"]


def made(title: str, values: dict[str, list[float]]) -> Submission:
    rows = [
        Row(set=one, seed=i, digest="", values=dict.fromkeys(MEASURES, 1.0) | {"macro_f1": v})
        for one, given in values.items()
        for i, v in enumerate(given)
    ]
    return Submission(method=title.lower(), title=title, version=2, rows=rows)


def test_ranks_have_intervals_and_say_who_is_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = {s: rng.normal(0, 0.01, 10) for s in ("adult", "unsw")}
    good = made("Good", {s: list(0.8 + e) for s, e in noise.items()})
    twin = made("Twin", {s: list(0.8 + rng.permutation(e)) for s, e in noise.items()})
    bad = made("Bad", {s: list(0.5 + e) for s, e in noise.items()})
    board = rank_submissions([bad, good, twin])
    assert [p.title for p in board.places][2] == "Bad" and board.places[2].rank == 3.0 and board.places[2].alike == ()
    first = board.places[0]
    assert first.low <= first.rank <= first.high and first.alike == (board.places[1].title,)
    page = to_markdown(board, load_suite())
    assert "| 3 | Bad | 3.00 | 3.00 to 3.00 | none |" in page
    answer = write_board(tmp_path, board, load_suite())
    assert answer["ranking"][0]["alike"] and (tmp_path / "ranks.svg").read_text().startswith("<?xml")
    fewer = replace(good, rows=[r for r in good.rows if r.set == "adult"])
    assert rank_submissions([fewer, bad]).sets == ("adult",)
    with pytest.raises(FedtailError, match="versions 1 and 2 of the suite"):
        rank_submissions([good, replace(bad, version=1)])
    with pytest.raises(FedtailError, match="in common"):
        rank_submissions([fewer, replace(bad, rows=[r for r in bad.rows if r.set == "unsw"])])


def test_intervals_are_as_wide_as_the_unbiased_spread_of_few_seeds_says() -> None:
    turns = [0.5, 0.7, 0.7, 0.5, 0.7]
    board = rank_submissions([made("One", {"adult": turns}), made("Two", {"adult": [0.6] * 5})])
    ranks = np.where(np.array(turns) > 0.6, 1.0, 2.0)
    stretched = 5 / 4
    for p in board.places:
        assert p.high - p.low == pytest.approx(0.8 * np.sqrt(stretched), abs=0.02), "of draws alone: .8"
    assert board.places[0].rank == ranks.mean()


def test_bad_submissions_and_words_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(FedtailError, match="it has no"):
        read_submission(tmp_path)
    (tmp_path / "submission.json").write_text('{"rows": 3}')
    with pytest.raises(FedtailError, match="is not a submission"):
        read_submission(tmp_path)
    said = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "none")])
    assert isinstance(said.exception, FedtailError) and "fedtail bench --method" in str(said.exception)
    assert "flights" in CliRunner().invoke(app, ["bench", "--list"]).output


def test_sets_that_are_run_later_join_a_submission_unless_the_method_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    more = replace(SMALL.sets[0], name="more", settings={**SMALL.sets[0].settings, "data.n_max": 100})
    suite, method = replace(SMALL, share=0.5, sets=(SMALL.sets[0], more)), f"{file}:Mine"
    run = runner(tmp_path, 1)
    first = bench_method(suite, method, suite.sets[:1], 1, tmp_path, run)
    both = bench_method(suite, method, suite.sets[1:], 1, tmp_path, run)
    assert set(both.chosen) == {"blobs", "more"} and first.rows[0] in both.rows
    assert read_submission(tmp_path / "submissions" / "mine").values("macro_f1") == both.values("macro_f1")
    file.write_text(MINE.replace("0.05", "0.04"))
    assert set(bench_method(suite, method, suite.sets[1:], 1, tmp_path, run).chosen) == {"more"}


def test_submissions_of_several_machines_are_gathered_set_by_set(tmp_path: Path) -> None:
    more = replace(SMALL.sets[0], name="more", settings={**SMALL.sets[0].settings, "data.n_max": 100})
    suite, file = replace(SMALL, share=0.5, sets=(SMALL.sets[0], more)), tmp_path / "mine.py"
    file.write_text(MINE)
    for place, one in zip("ab", suite.sets, strict=True):
        for method in ("fedavg", f"{file}:Mine"):
            bench_method(suite, method, [one], 1, tmp_path / place, runner(tmp_path / place, 1))
    gather([tmp_path / "a", tmp_path / "b"], tmp_path)
    for one in submissions(tmp_path):
        assert set(one.chosen) == set(one.trials) == set(one.hardware) == {"blobs", "more"}
        assert sorted(row.set for row in one.rows) == ["blobs", "more"]
    assert rank_submissions(submissions(tmp_path)).sets == ("blobs", "more")
    assert (tmp_path / "submissions" / "mine" / "mine.py").is_file()

    file.write_text(MINE.replace("0.05", "0.04"))
    bench_method(suite, f"{file}:Mine", suite.sets[:1], 1, tmp_path / "c", runner(tmp_path / "c", 1))
    for place, why in {"c": "of two versions", "empty": "no submissions in"}.items():
        with pytest.raises(FedtailError, match=why):
            gather([tmp_path / place], tmp_path)


def test_a_set_that_fails_leaves_the_others_in_the_submission(tmp_path: Path) -> None:
    bad = replace(SMALL.sets[0], name="bad", settings={**SMALL.sets[0].settings, "engine.device": "cuda:9"})
    suite, run = replace(SMALL, share=0.5, sets=(SMALL.sets[0], bad)), runner(tmp_path, 1)
    with pytest.raises(FedtailError):
        bench_method(suite, "fedavg", suite.sets, 1, tmp_path, run)
    (kept,) = submissions(tmp_path)
    assert list(kept.chosen) == list(kept.trials) == ["blobs"] and [row.set for row in kept.rows] == ["blobs"]
    again = bench_method(suite, "fedavg", suite.sets[:1], 2, tmp_path, run)  # more seeds replace what there was
    assert [(row.set, row.seed) for row in again.rows] == [("blobs", 0), ("blobs", 1)]


def test_the_committed_leaderboard_is_that_of_the_committed_submissions() -> None:
    folder = Path(__file__).parents[2] / "results" / "bench"
    board = rank_submissions(submissions(folder))
    assert board.seeds == load_suite().seeds and {p.submission.version for p in board.places} == {1}
    later = {"fednpc", "fedrela", "fedwcm", "ldam_drw"}  # methods that version 1 of the suite has not seen
    assert {p.submission.method for p in board.places} == set(METHODS) - later
    assert (folder / "leaderboard.md").read_text() == to_markdown(board, load_suite())


def test_what_has_been_run_of_version_2_is_ranked_as_committed() -> None:
    folder = Path(__file__).parents[2] / "results" / "bench" / "version-2"
    board = rank_submissions(submissions(folder))
    assert {p.submission.version for p in board.places} == {load_suite().version}
    assert "trees" in {s.method for s in board.beside}, "which take no images"
    assert all(p.submission.sets >= set(board.sets) for p in board.places)
    assert (folder / "leaderboard.md").read_text() == to_markdown(board, load_suite())


def test_a_narrow_terminal_has_ranks_alone_and_no_number_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a-long-name-{i}" for i in range(6)]
    rows = [Row(name, seed, "", dict.fromkeys(MEASURES, 0.1234)) for name in names for seed in range(2)]
    done = Submission("fedavg", "FedAvg", 1, chosen={name: {} for name in names}, rows=rows)
    board = rank_submissions([done, replace(done, method="fedprox", title="FedProx")])
    for width, has in ((80, False), (160, True)):
        console = Console(width=width, file=(file := io.StringIO()))
        monkeypatch.setattr("fedtail_experiments.cli.bench.terminal", lambda c=console: c)
        print_board(board)
        assert ("0.123" in file.getvalue()) is has and "…" not in file.getvalue() and "FedProx" in file.getvalue()


def test_a_method_is_ranked_among_those_that_have_its_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = replace(SMALL.sets[0], name="more", settings={**SMALL.sets[0].settings, "data.n_max": 100})
    suite = replace(SMALL, share=0.5, seeds=1, sets=(SMALL.sets[0], more))
    monkeypatch.setattr("fedtail_experiments.cli.bench.load_suite", lambda: suite)
    words = ["--workers", "1", "--out", str(tmp_path), "--json"]
    assert CliRunner().invoke(app, ["bench", "--method", "fedavg", "--only", "more", *words]).exit_code == 0
    said = CliRunner().invoke(app, ["bench", "--method", "fedprox", "--only", "blobs", *words])
    assert said.exit_code == 0, said.exception
    assert [p["method"] for p in json.loads(said.stdout.strip().splitlines()[-1])["ranking"]] == ["fedprox"]


def test_a_part_of_the_sets_is_ranked_without_touching_the_leaderboard(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "results" / "bench"
    shutil.copytree(committed / "submissions", tmp_path / "submissions")
    words = ["bench", "--only", "image", "--only", "unsw", "--out", str(tmp_path), "--json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.exception
    answer = json.loads(said.stdout.strip().splitlines()[-1])
    assert "unsw" in answer["sets"] and "elpv" in answer["sets"] and "adult" not in answer["sets"]
    assert not (tmp_path / "leaderboard.md").exists()
    whole = rank_submissions([read_submission(p) for p in sorted((tmp_path / "submissions").iterdir())])
    assert [p["method"] for p in answer["ranking"]] != [p.submission.method for p in whole.places]


def test_a_method_on_some_of_the_sets_alone_stands_beside_the_ranking_of_the_others() -> None:
    values = {"adult": [0.7, 0.71], "elpv": [0.5, 0.52]}
    both, mine = [made(title, values) for title in ("FedAvg", "FedProx")], made("FedCGN", {"adult": [0.9, 0.9]})
    board = rank_submissions([*both, mine])
    assert board.sets == ("adult", "elpv") and [s.title for s in board.beside] == ["FedCGN"]
    assert rank_submissions([both[0], mine]).sets == ("adult",), "no more than half have the other"
    assert len(rank_submissions([*both, mine], only=["adult"]).places) == 3


def test_trees_take_the_tables_with_a_grid_of_their_own_and_stand_beside_the_ranking(tmp_path: Path) -> None:
    suite = load_suite()
    table, image = suite.only(["adult"])[0], suite.only(["elpv"])[0]
    assert [one.name for one in suite.taken([table, image], "trees")] == ["adult"]
    with pytest.raises(FedtailError, match="sets of kind table only"):
        suite.taken([image], "trees")
    settings = suite.settings(table, "trees")
    assert not any(key.startswith(("local.", "model.", "rates.")) for key in settings)
    check_config(layered([settings, {"method.name": "trees"}, trials_of(suite, table, "trees")[0]]))
    assert len(trials_of(suite, table, "trees")) == math.ceil(suite.share * 27)

    values = {"adult": [0.7, 0.71], "elpv": [0.5, 0.52]}
    nets = [replace(made(title, values), chosen={"adult": {}, "elpv": {}}) for title in ("FedAvg", "FedProx")]
    trees = replace(made("Trees", {"adult": [0.72, 0.74]}), chosen={"adult": {}})
    board = rank_submissions([*nets, trees])
    assert {p.title for p in board.places} == {"FedAvg", "FedProx"} and board.sets == ("adult", "elpv")
    page = to_markdown(board, suite)
    assert page.count("Trees (beside the ranking)") == 1 and "| 0.730 ± 0.014 |" in page
    assert [p.title for p in rank_submissions([trees]).places] == ["Trees"]


def test_a_method_that_changes_the_model_after_the_last_round_is_tuned_by_what_it_made(tmp_path: Path) -> None:
    base = {**SMALL.sets[0].settings, "method.name": "ccvr", "run.rounds": 1, "method.virtual": 50}
    cells = [
        Cell(f"step {lr:g}", check_config(layered([base, {"method.steps": steps, "method.step_lr": lr}])))
        for steps, lr in ((0, 0.1), (30, 0.001), (30, 0.3))
    ]
    found = run_cells(cells, tmp_path)
    assert [o.error for o in found] == [None] * 3
    plain, little, much = (validation_score(o, "macro_f1") for o in found)
    assert len({plain, little, much}) > 1, "else the race would choose its own settings by chance"
    final = json.loads((found[2].folder / "result.json").read_text())["validation"]["macro_f1"]
    assert much == final and much != plain


def test_another_method_of_the_same_name_does_not_take_a_submission_s_place(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(MINE.replace("Mine", "FedAvg"))
    (tmp_path / "two.py").write_text(MINE.replace("Mine", "FedAvg"))
    folder = tmp_path / "submissions" / "fedavg"
    folder.mkdir(parents=True)
    for there, comes in (("fedavg", "one.py:FedAvg"), ("one.py:FedAvg", "two.py:FedAvg"), ("one.py:FedAvg", "fedavg")):
        told = {"method": there, "title": "x", "version": 2, "source": there.rpartition(":")[0], "rows": []}
        (folder / "submission.json").write_text(json.dumps(told))
        given = comes.replace("two.py", f"{tmp_path}/two.py").replace("one.py", f"{tmp_path}/one.py")
        with pytest.raises(FedtailError, match="give the class another name"):
            bench_method(SMALL, given, SMALL.sets, 1, tmp_path, runner(tmp_path, 1))
        assert json.loads((folder / "submission.json").read_text()) == told


def test_what_a_submission_was_run_with_is_of_its_method_s_grid(tmp_path: Path) -> None:
    chosen = {"blobs": {**trials_of(SMALL, SMALL.sets[0], "fedavg")[0], "run.rounds": 400}}
    told = {"method": "fedavg", "title": "FedAvg", "version": 2, "chosen": chosen, "rows": []}
    (tmp_path / "submission.json").write_text(json.dumps(told))
    with pytest.raises(FedtailError, match=r"no point of the method's grid: .*'run\.rounds': 400"):
        verify(SMALL, tmp_path, runner(tmp_path, 1))


def test_the_committed_submissions_have_run_the_best_of_the_suite_s_points() -> None:
    suite = load_suite()
    known = {one.name: one for one in suite.sets}
    folder = Path(__file__).parents[2] / "results" / "bench" / "version-2"
    for done in submissions(folder):
        for name, chosen in done.chosen.items():
            field, trials = trials_of(suite, known[name], done.method), done.trials[name]
            first, last = trials[0]["rounds"], trials[-1]["rounds"]
            assert [t["settings"] for t in trials if t["rounds"] == first] == field, (done.method, name)
            assert chosen == max((t for t in trials if t["rounds"] == last), key=lambda t: t["score"])["settings"]


def test_a_method_of_ones_own_may_say_what_of_its_own_is_tried(tmp_path: Path) -> None:
    told = '    title = "Mine"\n    searched = {"size": (0.1, 0.05)}\n    size: float = 0.1\n'
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(MINE.replace('    title = "Mine"\n', told))
    here, there = (trials_of(SMALL, SMALL.sets[0], f"{tmp_path}/{folder}/m.py:Mine") for folder in ("one", "two"))
    assert here == there, "wherever the file lies"
    assert len(here) == 8 and {point["method.size"] for point in here} == {0.1, 0.05}


def test_one_seed_has_no_interval_and_tells_no_methods_apart() -> None:
    board = rank_submissions([made("One", {"adult": [0.7]}), made("Two", {"adult": [0.6]})])
    assert [(p.title, p.rank, p.alike) for p in board.places] == [("One", 1.0, ("Two",)), ("Two", 2.0, ("One",))]
    assert "| 1 | One | 1.00 | – | Two |" in to_markdown(board, load_suite())
    assert "1 seed, " in to_markdown(board, load_suite())
