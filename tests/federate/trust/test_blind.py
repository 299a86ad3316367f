"""Runs that nobody steers, from the agreement to the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtail.core.privacy import gaussian_epsilon
from fedtail.core.scores import Scores
from fedtail.core.totals import LIMIT
from fedtail.errors import FedtailError
from fedtail.federate import relay
from fedtail.federate.exchanges import Journal
from fedtail.federate.protocol import agreement
from fedtail.federate.protocol.agreement import Party, read_roster, read_site_key
from fedtail.federate.protocol.masks import Sum, check_sums, pack_sums, read_answer, read_sums
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parts, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.member import SiteTotals, SumError
from fedtail.federate.site.own import TableSite
from fedtail.federate.site.site import Site
from fedtail.federate.summed import scores_reach
from fedtail.runs.config import changed, check_config, load_config
from fedtail.runs.execution import run

from .loopback import Wires, open_sites, settings, table_sites


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed that sites draw, so that a test compares the same models every time."""
    for module in (agreement, relay):
        monkeypatch.setattr(module, "seed_of", lambda name, numbers: 7)


def agreed_parties(root: Path, names: list[str]) -> dict[str, Party]:
    """The sites of an agreement, as if they had exchanged their messages."""
    roster = read_roster(root / names[0] / "sites.pub")
    parties = {name: Party(name, {"sites": names}) for name in names}
    offers = {name: p.offer(read_site_key(root / name / "site.key"), roster) for name, p in parties.items()}
    revealed = {name: p.reveal(roster, offers) for name, p in parties.items()}
    numbers = {name: number for name, (number, _) in revealed.items()}
    for name, party in parties.items():
        party.begin(numbers, {peer: sealed[name] for peer, (_, sealed) in revealed.items() if peer != name})
    return parties


def test_three_sites_come_to_the_model_of_the_simulator(tmp_path: Path) -> None:
    config = settings(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    seed = result.settings.run.seed
    assert seed != config.run.seed
    same = settings(tmp_path / "simulator", run={"seed": seed}, engine={"path": "reference"})
    expected = run(same)
    assert torch.allclose(result.x, expected.x, atol=1e-5)
    assert result.test["accuracy"] == expected.test["accuracy"]


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"name": "fedavg"}, "server": {"optimizer": "adam"}},
        {"local": {"batch_size": "auto", "lr": "auto"}, "run": {"rounds": 8, "metric": "macro_f1", "select": "best"}},
        {"decision": {"goal": "macro_f1", "calibrate": "temperature"}},
    ],
    ids=["adam at the server", "race and selection", "decision"],
)
def test_what_needs_sums_only_is_the_simulators(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = settings(tmp_path, **sections)
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    run_section = {**sections.get("run", {}), "seed": result.settings.run.seed}
    more = {**sections, "run": run_section, "engine": {"path": "reference"}}
    if sections.get("local", {}).get("batch_size") == "auto":  # follows the mean site here, the median one there
        more["local"] = {**sections["local"], "batch_size": result.summary["found"]["batch_size"]}
    expected = run(settings(tmp_path / "simulator", **more))
    assert torch.allclose(result.x, expected.x, rtol=1e-4, atol=1e-4)
    assert result.test["macro_f1"] == expected.test["macro_f1"]
    assert result.decision.weights == pytest.approx(expected.decision.weights)


def test_logistic_regression_needs_sums_only(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"method": {"name": "logistic"}, "run": {"rounds": 8, "select": "best"}}
    config = changed(settings(tmp_path, **sections), {"model.name": "linear"})
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    sections["run"]["seed"] = result.settings.run.seed
    expected = run(changed(settings(tmp_path / "simulator", **sections), {"model.name": "linear"}))
    assert torch.allclose(result.x, expected.x, rtol=1e-3, atol=1e-3)
    assert result.summary["selected_round"] == expected.summary["selected_round"]
    assert result.test["macro_f1"] == expected.test["macro_f1"]


def test_an_update_beyond_fixed_point_stops_the_run_and_wraps_nothing(tmp_path: Path) -> None:
    rough = {"local": {"batch_size": 32, "lr": 50.0}, "method": {"name": "fedavg"}, "run": {"rounds": 1}}
    config = settings(tmp_path, **rough)
    names, sites = open_sites(tmp_path / "sites", config)
    with pytest.raises(FedtailError, match=r"whose training diverged \(lower local.lr\): its audit"):
        federate(config, Wires(sites), names)
    said = (tmp_path / "sites" / names[0] / "audit.jsonl").read_text().splitlines()[-1]
    assert "lower local.lr" in said


def test_fedhoo_searches_over_clusters_by_one_sum_of_each(tmp_path: Path) -> None:
    rates = {"name": "fedhoo_clusters", "labels": list("aaabbb"), "cold_rounds": 1}
    config = settings(tmp_path, 6, rates=rates)
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    simulated = settings(
        tmp_path / "s", 6, rates=rates, run={"seed": result.settings.run.seed}, engine={"path": "reference"}
    )
    expected = run(simulated)
    assert torch.allclose(result.x, expected.x, atol=1e-5)
    assert [r["rates"] for r in result.history] == [r["rates"] for r in expected.history]


@pytest.mark.parametrize("who", ["server", "site"])
def test_a_run_goes_on_where_it_was_with_the_same_model(tmp_path: Path, who: str) -> None:
    """The server, or a site, is killed after every third exchange; nothing is lost, and nothing is answered twice in
    different words."""
    config = settings(tmp_path, run={"name": "whole"})
    names, sites = open_sites(tmp_path / "sites", config)
    wires, answers = Wires(sites), dict[tuple[int, int], Parts]()
    stops = 0

    class Killed(Exception):
        pass

    def watched(phase: str, client: int, asked: Parts, reply: Parts) -> Parts:
        nonlocal stops
        found = unpack(reply)
        if phase != Phase.STEP or "masked" not in found.tensors:
            return reply
        key = (client, found.meta["number"])
        assert answers.setdefault(key, reply) == reply
        if client == 2 and key[1] % 3 == 0 and stops < key[1] // 3:
            stops += 1
            if who == "server":
                raise Killed
            fresh = open_sites(tmp_path / "sites", config)[1]
            wires.sites[1] = fresh[1].handle
        return reply

    wires.tamper, resume = watched, False
    while True:
        try:
            result = federate(config, wires, names, resume=resume)
            break
        except Killed:
            resume = True
    assert stops >= 3
    same = settings(tmp_path / "simulator", run={"seed": result.settings.run.seed}, engine={"path": "reference"})
    assert torch.allclose(result.x, run(same).x, atol=1e-5)
    for name in names:
        (own,) = (tmp_path / "sites" / name / "agreements").glob("*/run/model.safetensors")
        assert own.read_bytes() == (tmp_path / "runs" / "whole" / "model.safetensors").read_bytes(), "all have it"


def test_a_site_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PAUSE", 0.0)
    config = settings(tmp_path, run={"rounds": 1})
    names, sites = open_sites(tmp_path / "sites", config)
    wires, away = Wires(sites), iter([True, True, False, True] + [False] * 100)

    def offline(phase: str, client: int, asked: Parts, reply: Parts) -> Parts | None:
        return None if client == 1 and phase == Phase.STEP and next(away) else reply

    wires.tamper = offline
    result = federate(config, wires, names)
    same = settings(
        tmp_path / "simulator", run={"seed": result.settings.run.seed, "rounds": 1}, engine={"path": "reference"}
    )
    assert torch.allclose(result.x, run(same).x, atol=1e-5)


def test_a_run_does_not_go_on_with_other_rows_at_a_site(tmp_path: Path) -> None:
    """Its weight is that of the rows it began with: with five times as many, updates would count five times."""
    config, names, sites = table_sites(tmp_path)
    wires, file = Wires(sites), tmp_path / "1.csv"
    whole, opened = file.read_text(), []

    def restarted(phase: str, client: int, asked: Parts, reply: Parts) -> Parts:
        if phase == Phase.STEP and client == 2 and unpack(asked).meta["number"] == 7 and not opened:
            head, *rows = whole.splitlines(keepends=True)
            file.write_text(head + "".join(rows * 5))
            data = TableSite(file, tmp_path / "schema.toml")
            opened.append(Site(names[1], data, Policy(), tmp_path / "sites" / names[1]))
            wires.sites[1] = opened[0].handle
        return reply

    wires.tamper = restarted
    with pytest.raises(FedtailError, match=rf"{names[1]}: it no longer matches what it agreed to"):
        federate(config, wires, names)
    assert "restore them, or start a new run" in (tmp_path / "sites" / names[1] / "audit.jsonl").read_text()
    file.write_text(whole)
    wires.sites[1] = Site(names[1], TableSite(file, tmp_path / "schema.toml"), Policy(), opened[0].folder).handle
    assert len(federate(config, wires, names, resume=True).history) == config.run.rounds


def test_what_several_sites_say_is_told_once(tmp_path: Path) -> None:
    config, names, sites = table_sites(tmp_path, methods=["trees"])
    with pytest.raises(FedtailError, match=rf"sites \({', '.join(names)}: site policy: the method [^;]*\)"):
        federate(config, Wires(sites), names)


def test_columns_are_scaled_and_cut_as_in_the_simulator(tmp_path: Path) -> None:
    config, names, sites = table_sites(tmp_path, rows=150)
    result = federate(config, Wires(sites), names)
    data = {
        "name": "site_tables", "path": str(tmp_path / "?.csv"), "schema": str(tmp_path / "schema.toml"),
        "test_fraction": 0.2,
    }  # fmt: skip
    raw = {**config.model_dump(exclude={"data", "run"}), "data": data}
    raw |= {"run": {"rounds": 3, "seed": result.settings.run.seed, "folder": str(tmp_path / "s")}}
    expected = run(check_config(raw))
    for name in names:  # what a report of a site's copy calls its data
        (own,) = (tmp_path / "sites" / name / "agreements").glob("*/run")
        assert load_config(own).data.name == "sites"
    ours, theirs = result.about.preprocessing["columns"], expected.about.preprocessing["columns"]
    assert [c["name"] for c in ours] == [c["name"] for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["kind"] == b["kind"] and a.get("missing") == b.get("missing") and ("mean" in a) == ("mean" in b)
        for key in ("mean", "std", "cuts"):
            assert np.allclose(a.get(key) or 0.0, b.get(key) or 0.0, rtol=1e-6), (a["name"], key)
    assert torch.allclose(result.x, expected.x, atol=2e-3)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"method": {"name": "scaffold"}}, "needs more than sums of updates"),
        ({"server": {"aggregate": "krum"}}, "compares updates; use 'mean'"),
        ({"rates": {"name": "fedhoo"}}, "use rates.name = 'fedhoo_clusters'"),
        ({"run": {"quorum": 0.5}}, "needs all sites in every round"),
        ({"privacy": {"mode": "local"}}, "goes with privacy.mode = 'none'"),
        ({"deploy": {"trust": "private"}}, "goes with privacy.mode = 'shares'"),
    ],
)
def test_what_needs_more_than_sums_is_refused_in_one_line(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    config = settings(tmp_path, **sections)
    names, sites = open_sites(tmp_path / "sites", config)
    with pytest.raises(FedtailError, match=words) as refused:
        federate(config, Wires(sites), names)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "runs").glob("*/*"))


# -- noise ------------------------------------------------------------------------------------------------------------


def private(folder: Path, **more: Any) -> Any:
    sections: dict[str, Any] = {
        "deploy": {"trust": "private"}, "privacy": {"mode": "shares", "noise": 0.01},
        "model": {"name": "mlp", "hidden": [8]}, "run": {"rounds": 2},
    }  # fmt: skip
    return settings(folder, **{**sections, **more})


def test_every_sum_of_a_private_run_has_noise_and_a_price(tmp_path: Path) -> None:
    config = private(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config, Policy(trust="private", max_epsilon=1e9))
    result = federate(config, Wires(sites), names)
    assert torch.isfinite(result.x).all()
    lines = (tmp_path / "sites" / "site-0" / "ledger.jsonl").read_text().splitlines()
    releases = [line for line in map(json.loads, lines) if line["kind"] == "releases"]
    numbers = {int(line["key"].rpartition("/")[2]) for line in releases}
    exchanges = max(numbers)
    assert numbers == set(range(1, exchanges + 1)) and all(line["noise"] == 0.01 for line in releases)
    assert result.summary["privacy"]["releases"] == exchanges, "also what came after the last round"
    whole = result.summary["privacy"]["epsilon"]
    assert whole == gaussian_epsilon({0.01: exchanges}, 1e-5)
    assert f"({whole:.3g}, 1e-05) for all sums" in result.report().read_text()
    spent = result.history[-1]["privacy"]
    assert spent["releases"] == result.history[-1]["exchange"] and spent["epsilon"] > 0
    without = settings(
        tmp_path / "s", run={"rounds": 2, "seed": result.settings.run.seed}, engine={"path": "reference"}
    )
    apart = float((result.x - run(without).x).norm())
    assert apart > 1e-4, "noise moved the model"


def test_noise_is_as_much_as_it_says(tmp_path: Path) -> None:
    """A sum of zeros over three sites, whose rows can move it by 5: deviation z times 5."""
    names, _ = open_sites(tmp_path / "sites", private(tmp_path))
    parties = agreed_parties(tmp_path / "sites", names)
    sums, found = Sum(20_000, LIMIT), []
    for name in names:

        def sent(number: int, answer: Parts) -> Parts:
            sums.add(*read_answer(unpack(answer), number, LIMIT))
            raise StopIteration

        totals = SiteTotals(parties[name], [range(3)], Journal(tmp_path / f"journal-{name}"), sent, 2.0, found.append)
        with pytest.raises(StopIteration):
            totals.total(20_000, lambda k: np.zeros(20_000, dtype=np.int64), reach=5000.0)
    total, checks = read_sums(pack_sums([sums]), 1, 20_000, LIMIT)
    check_sums(total, checks, parties[names[0]].common, 1, [names])
    assert abs(total.std() / 10_000 - 1) < 0.03 and abs(total.mean()) < 300 and found == [1, 1, 1]
    open_ended = SiteTotals(parties[names[0]], [range(3)], Journal(tmp_path / "journal"), sent, 2.0, found.append)
    with pytest.raises(SumError, match="no bound on what one row can change"):
        open_ended.total(3, lambda k: np.zeros(3, dtype=np.int64))


def test_a_budget_that_is_spent_stops_the_run_before_the_answer_leaves(tmp_path: Path) -> None:
    config = private(tmp_path, privacy={"mode": "shares", "noise": 1.0})
    names, sites = open_sites(tmp_path / "sites", config, Policy(max_epsilon=6.0))
    wires = Wires(sites)
    with pytest.raises(FedtailError, match="its privacy budget is used up"):
        federate(config, wires, names)
    answered = [unpack(r).meta["number"] for p, k, _, r in wires.said if p == Phase.STEP and "tensor/masked" in r]
    spent = Ledger(tmp_path / "sites" / "site-0").releases()
    assert spent == {1.0: max(answered)} and gaussian_epsilon(spent, 1e-5) <= 6.0
    with pytest.raises(FedtailError, match="its privacy budget is used up"):
        federate(private(tmp_path, run={"rounds": 1, "name": "second"}), Wires(sites), names)


def test_a_row_that_is_replaced_moves_scores_by_no_more_than_their_reach() -> None:
    rng = np.random.default_rng(0)
    for c in (2, 5):
        reach = scores_reach(c)
        for _ in range(30):
            p, y = rng.dirichlet(np.full(c, 0.05), 6), rng.integers(0, c, 6)
            q, z = p.copy(), y.copy()
            q[0], z[0] = rng.dirichlet(np.full(c, 0.05)), rng.integers(0, c)
            one, other = (Scores.of(*pair) for pair in ((p, y), (q, z)))
            moved = np.concatenate([(vars(one)[n] - vars(other)[n]).ravel() for n in vars(one)])
            assert len(moved) == len(reach) and ((moved / reach) ** 2).sum() <= 1
