"""What federating gains each site over being alone, and what not pooling costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedtail.cli import main
from fedtail.report import load_run, write_report
from fedtail.report.comparison import comparisons
from fedtail.report.sections.yardsticks import verdict_of_federating
from fedtail.report.tables import headline
from fedtail.runs.build import build_federation
from fedtail.runs.config import load_config
from fedtail.runs.execution import run
from fedtail.runs.record import TITLES, AtSite, Yardstick, beside
from fedtail.settings import Settings
from fedtail.study.compare import chosen_methods, method_configs
from fedtail.study.yardsticks import best_pooled, chosen_sites, measure_yardsticks
from tests.conftest import blob_federation
from tests.encoders import TINY, draw_folder
from tests.run_folders import write_run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Yardstick]]:
    base = tmp_path_factory.mktemp("yardsticks")
    settings = ["data.name=blobs", "data.n_max=80", "data.clients=3", "run.rounds=4", "run.name=a"]
    config = load_config(None, [*settings, f"run.folder={base}"])
    run(config)
    return base, list(measure_yardsticks(config, load_run(base / "a"), base))


def test_every_yardstick_has_test_metrics_and_sites_alone_are_named(measured: tuple[Path, list[Yardstick]]) -> None:
    _, found = measured
    assert [y.kind for y in found] == list(TITLES)
    assert all(0 <= y.test["macro_f1"] <= 1 and y.run == "a" for y in found)
    for y in found:  # what a run has, its yardsticks have
        assert all(np.isfinite(y.test[name]) for name in ("pr_auc", "rare_pr_auc", "calibration_error", "worst_site"))
    alone = found[0]
    assert len(alone.sites) == 3 and alone.test["macro_f1"] == pytest.approx(np.mean([s.test for s in alone.sites]))


def test_of_two_pooled_models_the_better_on_validation_rows_is_the_yardstick() -> None:
    federation = blob_federation(3)
    setup: Any = SimpleNamespace(raw=federation, settings=Settings())
    y, width = torch.cat([federation.pool.y, federation.test.y]).numpy(), federation.n_classes
    x = torch.cat([federation.transform(s.x) for s in (federation.pool, federation.test)]).numpy()
    truth = {row.tobytes(): np.eye(width)[c] for row, c in zip(x, y, strict=True)}

    def knowing(_: Any) -> Any:
        return lambda rows: np.array([truth[row.tobytes()] + 0.1 for row in rows])

    def blind(_: Any) -> Any:
        return lambda rows: np.tile(np.arange(1.0, width + 1), (len(rows), 1))

    for fits in ([blind, knowing], [knowing, blind]):
        assert best_pooled(setup, fits)["test"]["macro_f1"] == 1.0


def test_a_yardstick_answers_by_the_decision_that_the_run_has(tmp_path: Path) -> None:
    settings = ["data.name=blobs", "data.n_max=120", "data.imbalance=30", "data.clients=2", "run.rounds=2"]
    settings += ["rates.rate=0", "local.lr=0.03", f"run.folder={tmp_path}"]

    def pooled(name: str, goal: str) -> dict[str, Any]:
        config = load_config(None, [*settings, f"run.name={name}", f"decision.goal={goal}"])
        run(config)
        return {y.kind: y.test for y in measure_yardsticks(config, load_run(tmp_path / name), tmp_path)}["pooled"]

    plain, decided = pooled("plain", "argmax"), pooled("decided", "macro_f1")
    assert decided["macro_f1"] > plain["macro_f1"], "else a run is compared with models that may not decide as it does"


def test_sites_of_a_table_are_measured_by_their_own_test_rows_and_one_without_validation_by_the_likeliest_class(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    y = rng.random(400) < 0.3
    rows = pd.DataFrame({"x": rng.normal(size=400) + y, "z": rng.normal(size=400), "bad": np.where(y, "yes", "no")})
    rows["site"] = np.where(np.arange(400) < 5, "tiny", np.where(rng.random(400) < 0.5, "a", "b"))
    rows.to_csv(tmp_path / "t.csv", index=False)
    given = [
        f"data.path={tmp_path / 't.csv'}",
        "data.name=table",
        "data.label=bad",
        "data.site=site",
        "decision.goal=macro_f1",
    ]
    config = load_config(None, [*given, "run.rounds=2", f"run.folder={tmp_path}", "run.name=a"])
    run(config)
    federation = build_federation(config)
    alone = next(iter(measure_yardsticks(config, load_run(tmp_path / "a"), tmp_path)))
    sites = {s.site: s for s in alone.sites}
    assert config.decision.goal == "macro_f1" and not len(federation.validation[federation.sites.index("tiny")])
    found = json.loads((tmp_path / "a" / "result.json").read_text())["sites"]
    together = {s["site"]: s["test"]["macro_f1"] for s in found if "test" in s}
    assert len(sites) == 3 and {"a", "b"} <= set(together)
    for name, value in together.items():  # the decision may be told apart in rounding only
        assert sites[name].federated == pytest.approx(value)


def test_what_is_on_file_is_not_measured_again(
    measured: tuple[Path, list[Yardstick]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, found = measured
    monkeypatch.setattr("fedtail.study.yardsticks.build_federation", None)
    config = load_config(base / "a")
    again = list(measure_yardsticks(config, load_run(base / "a"), base))
    assert [(y.kind, y.test["macro_f1"]) for y in again] == [(y.kind, y.test["macro_f1"]) for y in found]


def test_rows_are_marked_and_the_report_opens_with_what_federating_gains(
    measured: tuple[Path, list[Yardstick]],
) -> None:
    base, _ = measured
    (comparison,) = comparisons([load_run(base / "a")])
    table = headline(comparison)
    assert [row.label for row in table.yardsticks] == list(TITLES.values())
    said = verdict_of_federating(comparison)
    assert said.startswith("On their own rows, ") and "the same method on all data pooled" in said
    html = write_report([load_run(base / "a")], base / "r.html", "t").read_text()
    lead = html.partition('class="lead"')[2]
    assert lead.startswith(">On their own rows") and "all data pooled" in html and "Alone vs. federated" in html


def test_gain_and_cost_are_differences_to_the_run_they_were_measured_against(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    reached = load_run(folder).metric("macro_f1")
    site = AtSite(site="a", samples=10, test=0.1, own=0.2, federated=0.5)
    for kind, value in (("alone", reached - 0.25), ("pooled", reached + 0.05)):
        Yardstick(kind, 0, "r", {"macro_f1": value}, 1.0, (site,) if kind == "alone" else ()).save(
            tmp_path / "yardsticks" / f"{kind}-r.json"
        )
    Yardstick("pooled", 0, "another", {"macro_f1": 0.0}, 1.0).save(tmp_path / "yardsticks" / "pooled-another.json")
    assert len(beside([folder])) == 2
    said = verdict_of_federating(comparisons([load_run(folder)])[0])
    assert "gains 0.250 macro F1 over a site alone" in said
    assert "is 0.050 below the same method on all data pooled" in said
    assert "1 of 1 sites" in said and "+0.300" in said


def test_of_very_many_sites_some_of_every_size_are_trained_alone() -> None:
    federation = blob_federation(4)
    assert chosen_sites(federation) == [0, 1, 2, 3]


def test_runs_of_unequal_length_or_cut_short_are_marked_in_their_row(tmp_path: Path) -> None:
    whole, longer = write_run(tmp_path / "a", n_rounds=5), write_run(tmp_path / "b", method="fedcgnm", n_rounds=8)
    notes = {r.label: r.note for r in headline(comparisons([load_run(whole), load_run(longer)])[0]).rows}
    assert sorted(notes.values()) == ["5 rounds", "8 rounds"]
    short = write_run(tmp_path / "c", method="fedprox", n_rounds=3, asked=5)
    rows = headline(comparisons([load_run(whole), load_run(short)])[0]).rows
    assert [r.note for r in rows if "3 of 5" in r.note] == ["incomplete: 3 of 5 rounds"]
    early = write_run(tmp_path / "d", method="fedprox", n_rounds=3, asked=5)
    (early / "result.json").write_text((whole / "result.json").read_text())
    rows = headline(comparisons([load_run(whole), load_run(early)])[0]).rows
    assert any(r.note == "stopped after 3 rounds" for r in rows)


def test_a_method_may_bring_its_own_rate_strategy() -> None:
    names = chosen_methods("fedcgnm+fedhoo,fedavg, fedcgnm")
    configs = method_configs(names, None, ["rates.rate=0.4", "method.beta=0.6"], {"data.name": "blobs"})
    assert configs["fedcgnm+fedhoo"].rates.name == "fedhoo" and configs["fedcgnm+fedhoo"].method.options["beta"] == 0.6
    assert configs["fedavg"].rates.options == {"rate": 0.4} == configs["fedcgnm"].rates.options


def test_compare_prints_yardsticks_below_the_ranking(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    arguments = ["--dataset", "blobs", "data.n_max=60", "--clients", "2", "--rounds", "2", "--seeds", "1"]
    compared = ["--methods", "fedcgnm+grid,fedavg", "--yardsticks", "--out", str(tmp_path), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["fedtail", "compare", *arguments, *compared])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr().out
    assert not stop.value.code and "On their own rows" in out and "pooled gradient boosting" in out
    assert "neither ranked nor tested" in out
    answer = json.loads((tmp_path / "comparison.json").read_text())
    assert set(answer["problems"][0]["yardsticks"]) == set(TITLES.values())
    assert set(answer["learning_rates"]) == {"fedcgnm+grid", "fedavg"}


@pytest.mark.parametrize(("names", "said"), [("fedcgnm+fedho", "fedhoo"), ("fedcgn+", "rate strategy")])
def test_an_unknown_strategy_is_one_line(capsys: Any, monkeypatch: Any, names: str, said: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fedtail", "compare", "--methods", names])
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and said in err


def test_sites_alone_and_pooled_train_the_same_head_on_the_same_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAIL_CACHE", str(tmp_path / "cache"))
    photos = draw_folder(tmp_path / "photos", {"north": (40, 12, 6), "south": (20, 24, 8)})
    settings = [f"model.encoder={TINY}", "run.rounds=8", "local.batch_size=16", "run.name=a"]
    flags = {"data.name": "images", "data.path": str(photos), "run.folder": str(tmp_path / "runs")}
    config = load_config(None, settings, flags, suggest=True)
    result = run(config)
    found = {y.kind: y for y in measure_yardsticks(config, load_run(tmp_path / "runs" / "a"), tmp_path)}
    assert set(found) == {"alone", "pooled"}  # trees on pixels are no yardstick
    assert [s.samples for s in found["alone"].sites] == build_federation(config).sizes.tolist()
    assert found["pooled"].test["macro_f1"] > result.floor["macro_f1"]
