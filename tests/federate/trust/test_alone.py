"""How a server tries to be told of one site by itself: an agreement with nobody, settings that single one site out, and
the question which site can answer; docs/threat-model.md refers to these tests."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtail.boosting.bins import CELLS, divide
from fedtail.core.records import Task
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.federate import agreed, summed
from fedtail.federate.exchanges import Journal
from fedtail.federate.protocol.agreement import (
    SIGNATURE,
    AgreementError,
    Party,
    check_offers,
    hash_of,
    id_of,
    read_roster,
)
from fedtail.federate.protocol.agreement import read_site_key as key_of
from fedtail.federate.protocol.masks import derive, hide
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.member import SiteTotals, SumError
from fedtail.rounds.evaluation import scores_on
from fedtail.runs.config import check_config

from .loopback import Wires, make_folders, open_sites, settings, table_sites
from .test_blind import agreed_parties

NAMES = ["site-0", "site-1", "site-2"]
PRIVATE: dict[str, Any] = {"deploy": {"trust": "private", "timeout": 30.0}, "privacy": {"mode": "shares", "noise": 1.0}}


# -- an agreement with nobody -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["blind", "private"])
def test_nothing_is_begun_that_nobody_else_has_signed(tmp_path: Path, trust: str) -> None:
    """An offer, and a begin with the numbers and shares of no one, which fit the offers of no one: the site would be
    alone in every sum, without a mask."""
    config, names, sites = table_sites(tmp_path, trust=trust)
    if trust == "private":
        config = check_config({**config.model_dump(exclude={"deploy", "privacy"}), **PRIVATE})
    document = json.loads(json.dumps(agreed.write_document(config, agreed.declared_schema(config), names, "run")))

    def ask(phase: Phase, **meta: Any) -> Parcel:
        return unpack(sites[0].handle(phase, pack(Parcel(meta))))

    assert "offer" in ask(Phase.OFFER, document=document).meta
    assert ask(Phase.BEGIN, numbers={}, shares={}).meta == {"error": "agreement"}
    told = ask(Phase.STEP, agreement=id_of({}), number=1)
    assert told.meta == {"error": "agreement"} and not told.tensors


def test_no_vector_leaves_without_a_mask_for_every_other_site() -> None:
    pairs = {"site-1": derive(bytes(32), "a"), "site-2": derive(bytes(32), "b")}
    hide(np.arange(5), "site-0", pairs, bytes(32), 1, NAMES, 1 << 31)
    for missing in ({}, {"site-1": pairs["site-1"]}):
        with pytest.raises(KeyError):
            hide(np.arange(5), "site-0", missing, bytes(32), 1, NAMES, 1 << 31)


def test_a_key_in_other_letters_is_the_same_key(tmp_path: Path) -> None:
    """A site that offers another one's key: masks of the two would cancel at whoever stands between them."""
    make_folders(tmp_path, NAMES)
    roster, parties = read_roster(tmp_path / NAMES[0] / "sites.pub"), {name: Party(name, {}) for name in NAMES}
    offers = {name: p.offer(key_of(tmp_path / name / "site.key"), roster) for name, p in parties.items()}
    check_offers(roster, hash_of({}), offers)
    copied = replace(offers["site-2"], key=offers["site-1"].key.upper())
    signed = key_of(tmp_path / "site-2" / "site.key").sign(copied.statement, SIGNATURE).hex()
    with pytest.raises(AgreementError, match="two sites offer the same key"):
        check_offers(roster, hash_of({}), {**offers, "site-2": replace(copied, signature=signed)})


# -- settings that single one out -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rates",
    [
        {"rates": [0.0, 0.1, 0.0], "searches": "lr", "base_rate": 0.0},
        {"rates": [1e30, 0.0, 1e30], "searches": "weight_decay", "base_rate": 0.0},
        {"rates": [0.0, 0.0, 1.0]},
        {"rates": [0.1, 0.1, 0.1], "searches": "lr", "base_rate": [0.0, 0.0, 1.0]},
    ],
)
def test_sites_of_one_sum_train_alike(tmp_path: Path, rates: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate of 0 at all sites but one: their sum is that one's update, to its last digit."""
    config = settings(tmp_path, method={"name": "fedavg"}, rates={"name": "fixed", **rates}, run={"rounds": 1})
    names, sites = open_sites(tmp_path / "sites", config)
    with pytest.raises(FedtailError, match=r"sites of one sum train alike.*use rates.name = 'uniform'"):
        federate(config, Wires(sites), names)
    check = summed.check_alike

    def hostile(task: Task, groups: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # where the server is
            check(task, groups)

    monkeypatch.setattr(summed, "check_alike", hostile)
    with pytest.raises(FedtailError, match="site-0, site-1, site-2: it could not answer"):
        federate(config, Wires(sites), names)
    said = (tmp_path / "sites" / names[0] / "audit.jsonl").read_text().splitlines()[-1]
    assert "sites of one sum train alike" in said


def test_a_sum_covers_as_many_sites_as_the_policy_says(tmp_path: Path) -> None:
    """Also that of a cluster."""
    rates = {"name": "fedhoo_clusters", "labels": list("aaabbb"), "cold_rounds": 1}
    config = settings(tmp_path, 6, rates=rates)
    names, sites = open_sites(tmp_path / "sites", config, Policy(min_sites=5))
    document = json.loads(json.dumps(agreed.write_document(config, agreed.declared_schema(config), names, "run")))
    reply = unpack(sites[0].handle(Phase.OFFER, pack(Parcel({"document": document}))))
    assert reply.meta == {"error": "site"}
    assert "fewer than 5 sites" in (sites[0].folder / "audit.jsonl").read_text()


# -- who can answer ---------------------------------------------------------------------------------------------------


def test_which_site_has_diverged_is_not_told(tmp_path: Path) -> None:
    """At a learning rate at which one site's update is beyond fixed point, all sites answer as ever, and none goes on:
    who is silent, learning rate by learning rate, would tell each one's gradient, and with it its class counts."""
    rough = {"local": {"batch_size": 32, "lr": 50.0}, "method": {"name": "fedavg"}, "run": {"rounds": 1}}
    config = settings(tmp_path, **rough)
    names, sites = open_sites(tmp_path / "sites", config)
    wires = Wires(sites)
    with pytest.raises(FedtailError, match="or a site had nothing to add"):
        federate(config, wires, names)
    told = [(client, unpack(reply)) for phase, client, _, reply in wires.said if phase == Phase.STEP]
    refused = {client: found.meta["error"] for client, found in told if "error" in found.meta}
    assert refused == {0: "check", 1: "check", 2: "check"}
    shapes = {client: [v.shape for f in (found,) for v in f.tensors.values()] for client, found in told[-6:-3]}
    assert len({str(v) for v in shapes.values()}) == 1 and all(shapes.values()), "and the last answers look alike"
    words = [(tmp_path / "sites" / name / "audit.jsonl").read_text() for name in names]
    assert any("this site had nothing to add" in said for said in words)


def test_a_part_that_cannot_be_computed_makes_the_sum_random(tmp_path: Path) -> None:
    """The others' part is not what is left: nobody believes the sum, and all its digits are drawn."""
    make_folders(tmp_path, NAMES)
    parties, sent = agreed_parties(tmp_path, NAMES), dict[str, Parcel]()

    def part(client: int) -> np.ndarray:
        if client == 1:
            raise ValueError("a row of Jane Doe's")
        return np.ones(4000, dtype=np.int64)

    def answered(name: str) -> SiteTotals:
        def ask(number: int, answer: Any) -> Parcel:
            sent[name] = unpack(answer)
            raise StopIteration

        totals = SiteTotals(parties[name], [range(3)], Journal(tmp_path / f"journal-{name}"), ask)
        with pytest.raises(StopIteration):
            totals.total(4000, part, limit=1 << 31)
        return totals

    totals = {name: answered(name) for name in NAMES}
    added = np.sum([p.tensors["masked"].numpy().view(np.uint32) for p in sent.values()], axis=0, dtype=np.uint32)
    assert len(np.unique(added)) > 3900 and abs(added.view(np.int32).astype(float).mean()) < 1e8
    check = hex(sum(int(p.meta["check"], 16) for p in sent.values()) % ((1 << 61) - 1))
    back = Parcel({"checks": [check]}, {"sum/0": torch.from_numpy(added.view(np.int32))})
    for name in NAMES:
        totals[name].ask, totals[name].number = (lambda number, answer: back), 0
        with pytest.raises(SumError) as refused:
            totals[name].total(4000, part, limit=1 << 31)
        assert refused.value.code == "check" and ("Jane Doe" in str(refused.value)) == (name == "site-1")


def test_a_sum_that_a_site_has_poisoned_takes_no_memory() -> None:
    """Weights that nearly cancel: shares of what is left are no number of cells to divide one into."""
    edges = np.arange(1, CELLS, dtype=np.int64) << 23
    weights = np.full(CELLS, 1 << 22)
    weights[:2] += np.array([1, -1]) << 44  # with 2^58, more cells than any memory holds
    assert len(divide(edges, weights)) <= 2 * CELLS
    assert len(divide(edges, np.full(CELLS, 1 << 60))) <= 2 * CELLS, "and 64 bits do not hold their sum"


def test_a_model_that_ends_in_no_number_is_counted_all_the_same() -> None:
    """Whether a row overflows is no reason to answer or not: under noise, nobody adds that up."""
    logits = [(torch.tensor([[float("nan"), 0.0], [1.0, 2.0]]), torch.tensor([0, 1]))]
    found: Scores = scores_on(logits, 2)
    assert found.n == 2
