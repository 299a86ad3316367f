"""A plan before a federation: what counts allow, and what each site would gain."""

import json
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtail as ft
from fedtail.cli import app
from fedtail.data.federation import Federation
from fedtail.runs.build import build
from fedtail.runs.execution import play
from fedtail.settings import Settings
from fedtail.study.plan import halve, own_scores, plan, plan_counts, subset


@pytest.fixture(scope="module")
def federation() -> Federation:
    rng = np.random.default_rng(0)
    y = rng.random(1200) < 0.1
    frame = pd.DataFrame(
        {"a": rng.normal(2.0 * y), "y": np.where(y, "rare", "usual"), "site": rng.choice(list("NSW"), 1200)}
    )
    return ft.Federation.from_tables(frame, label="y", site="site", validation=0.2)


def test_counts_say_what_can_be_promised_and_what_is_missing(federation: Federation) -> None:
    rare, usual = plan_counts(federation, 0.95, 0.95)
    assert (rare.name, usual.name) == ("rare", "usual") and rare.needed == 59 > rare.held
    assert rare.promised == pytest.approx(0.05 ** (1 / rare.held)) and usual.promised > 0.95
    assert rare.cases + usual.cases == sum(map(len, (*federation.train, *federation.validation)))
    assert 0 < usual.detectable < rare.detectable < 1


def test_half_of_every_class_at_every_site_stays(federation: Federation) -> None:
    halved = halve(federation, 0)
    for whole, part in zip(federation.train, halved.train, strict=True):
        assert set(part) < set(whole)
        counts = [np.bincount(federation.pool.y[rows], minlength=2) for rows in (whole, part)]
        assert (counts[1] == (counts[0] + 1) // 2).all()


def test_a_subset_has_the_rows_of_its_members_alone(federation: Federation) -> None:
    part = subset(federation, [2, 0])
    assert part.sites == (federation.sites[2], federation.sites[0])
    assert part.train[0] is federation.train[2] and len(part.test) == len(federation.test)


def test_each_site_is_tried_alone_left_out_and_together(federation: Federation) -> None:
    settings = Settings.model_validate({"run": {"rounds": 2}, "local": {"lr": 0.3}})
    found = plan(federation, settings, 0.9, 0.9)
    assert [s.name for s in found.sites] == list(federation.sites)
    owners = federation.test_clients
    together = own_scores(federation, settings, range(3), owners)
    assert [s.together for s in found.sites] == [together[k] for k in range(3)]
    alone = own_scores(federation, settings, [1], owners)
    assert found.sites[1].alone == alone[1]
    text = found.markdown()
    assert "better off together than alone" in text and "| rare |" in text
    assert json.loads(json.dumps(asdict(found)))["classes"][0]["name"] == "rare"
    assert plan(replace(federation), settings, 0.9, 0.9, trials=False).sites == ()


def test_trees_that_ask_for_the_site_are_told_it() -> None:
    rng = np.random.default_rng(0)
    site, a = rng.integers(3, size=900), rng.normal(size=900)
    y = np.where(np.where(site == 0, a, -a) + 0.3 * rng.normal(size=900) > 0.3, "p", "n")
    frame = pd.DataFrame({"a": a, "b": rng.normal(size=900), "y": y, "site": np.array(list("NSW"))[site]})
    federation = ft.Federation.from_tables(frame, label="y", site="site")
    settings = Settings.model_validate({"run": {"rounds": 20}, "method": {"name": "trees"}, "model": {"name": "trees"}})
    together = own_scores(federation, settings, range(3), federation.test_clients)
    run = play(build(settings, federation))
    assert [together[k] for k in range(3)] == pytest.approx([site["test"]["macro_f1"] for site in run.sites])
    assert min(together.values()) > 0.7
    without = own_scores(federation, settings, [1, 0], federation.test_clients)  # whose numbers change places
    assert min(without[0], without[1]) > 0.7 > without[2]


def test_sites_are_tried_with_decisions_of_their_own() -> None:
    rng = np.random.default_rng(0)
    site = rng.integers(3, size=1200)
    y = rng.random(1200) < np.array([0.05, 0.2, 0.5])[site]
    frame = pd.DataFrame({"a": rng.normal(2.0 * y), "y": y.astype(str), "site": np.array(list("NSW"))[site]})
    federation = ft.Federation.from_tables(frame, label="y", site="site", validation=0.2)
    given = {"run": {"rounds": 20}, "method": {"name": "trees"}, "model": {"name": "trees"}}
    common, own = (Settings.model_validate({**given, "decision": {"scope": scope}}) for scope in ("global", "site"))
    together = own_scores(federation, own, range(3), federation.test_clients)
    run = play(build(own, federation))
    assert [together[k] for k in range(3)] == pytest.approx([site["test"]["macro_f1"] for site in run.sites])
    assert together != own_scores(federation, common, range(3), federation.test_clients)


def test_the_command_prints_a_page_and_writes_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["plan", "--dataset", "digits", "--counts", "--out", "plan.md"], catch_exceptions=False
    )
    assert result.exit_code == 0 and "# Plan of a federation" in result.output
    assert "| class | cases |" in (tmp_path / "plan.md").read_text()
