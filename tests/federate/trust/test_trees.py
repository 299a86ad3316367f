"""Trees of sites that tell sums only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtail import load_model
from fedtail.errors import FedtailError
from fedtail.federate.agreed import declared_schema, write_document
from fedtail.federate.protocol.agreement import plain_id
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, pack, unpack
from fedtail.federate.relay import RelayTotals
from fedtail.federate.server import federate
from fedtail.federate.site.site import Site
from fedtail.runs.config import check_config
from fedtail.runs.execution import run
from fedtail.settings import Settings

from .loopback import Wires, open_sites, settings, table_sites


def of_trees(folder: Path, **sections: dict[str, object]) -> Settings:
    more = {"method": {"name": "trees", "site": False, "least_rows": 2}, "model": {"name": "auto"}, **sections}
    raw = settings(folder, **more)  # type: ignore[arg-type]
    return raw.model_copy(update={"model": type(raw.model)()})


def test_three_blind_sites_grow_the_trees_of_the_simulator_bit_for_bit(tmp_path: Path) -> None:
    config = of_trees(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    seed = result.settings.run.seed
    expected = run(of_trees(tmp_path / "simulator", run={"seed": seed}))
    assert torch.equal(result.x, expected.x)
    assert result.confusion.tolist() == expected.confusion.tolist()
    assert [r["validation"]["macro_f1"] for r in result.history] == [
        r["validation"]["macro_f1"] for r in expected.history
    ]


def test_a_server_that_is_trusted_gets_the_same_trees_from_plain_sums(tmp_path: Path) -> None:
    """Also where it is killed in the middle; and without keys, signatures or masks."""
    config = of_trees(tmp_path, deploy={"trust": "server"}, run={"name": "plain"})
    names, sites = open_sites(tmp_path / "sites", config)
    for name in names:
        (tmp_path / "sites" / name / "sites.pub").unlink()
    wires = Wires(sites)

    class Killed(Exception):
        pass

    def kill(state: object, record: dict[str, object], seconds: float) -> None:
        if record["round"] == 1:
            raise Killed

    with pytest.raises(Killed):
        federate(config, wires, names, on_round=kill)
    result = federate(config, wires, names, resume=True)
    assert not {Phase.OFFER, Phase.REVEAL} & {phase for phase, *_ in wires.said}
    expected = run(of_trees(tmp_path / "simulator"))
    assert torch.equal(result.x, expected.x)
    assert result.confusion.tolist() == expected.confusion.tolist()
    masked = [unpack(r) for p, _, _, r in wires.said if p == Phase.STEP and "tensor/masked" in r]
    assert all(int(parcel.meta["check"], 16) == 0 for parcel in masked)


def test_what_nobody_has_signed_is_begun_at_no_site_that_does_not_trust(tmp_path: Path) -> None:
    config, names, sites = table_sites(tmp_path)
    document = write_document(config, declared_schema(config), names, "run")
    for trust, code in (("server", "policy-trust"), ("blind", "agreement")):
        asked = Parcel({"document": {**document, "trust": trust}, "seed": 1, "number": "00" * 32})
        assert unpack(sites[0].handle(Phase.BEGIN, pack(asked))).meta["error"] == code
    trusting = Site(names[0], sites[0].data, Policy(trust="server"), tmp_path / "sites" / names[0])
    plain = {**document, "trust": "server"}
    began = trusting.handle(Phase.BEGIN, pack(Parcel({"document": plain, "seed": 1, "number": "00" * 32})))
    assert "error" not in unpack(began).meta
    question = pack(Parcel({"agreement": plain_id(plain, "00" * 32), "number": 1}))
    assert "tensor/masked" in trusting.handle(Phase.STEP, question)
    refused = sites[0].handle(Phase.STEP, question)
    assert unpack(refused).meta["error"] == "policy-trust", "nor once the site has changed its mind"


def test_sites_are_a_column_and_every_site_answers_for_its_own_rows(tmp_path: Path) -> None:
    config = of_trees(tmp_path, method={"name": "trees", "least_rows": 2}, deploy={"trust": "server"})
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    assert "site" in result.summary["importance"]
    assert result.folder is not None
    model = load_model(result.folder)
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    assert model.at(names[1]).predict_proba(x).shape == (20, 4)


def test_trees_that_nobody_steers_know_no_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by site are no sum over sites: neither how many each has, nor their classes, by the gradients of each."""
    config, names, sites = table_sites(tmp_path)
    raw = {**config.model_dump(exclude={"method", "model", "local"}), "method": {"name": "trees"}}
    seen, sums = list[list[int]](), RelayTotals.sums

    def watched(self: RelayTotals, *asked: Any) -> np.ndarray:
        found = sums(self, *asked)
        seen.append(found[0].tolist())
        return found

    monkeypatch.setattr(RelayTotals, "sums", watched)
    result = federate(check_config(raw), Wires(sites), names)
    assert result.folder is not None and load_model(result.folder).architecture.get("sites") is None
    assert "site" not in result.summary["importance"]
    assert len(seen[6]) == 5, "rows of two classes and of three wards, but not of three sites"


def test_private_trees_are_refused_in_one_line(tmp_path: Path) -> None:
    config = of_trees(tmp_path, deploy={"trust": "private"}, privacy={"mode": "shares", "noise": 1.0})
    names, sites = open_sites(tmp_path / "sites", config)
    with pytest.raises(FedtailError, match="adds noise to updates of networks"):
        federate(config, Wires(sites), names)


def test_promised_recall_and_sets_that_cover_are_the_simulators_bit_for_bit(tmp_path: Path) -> None:
    """Thresholds, bounds and sets follow from masked counts alone, and those are the counts of the pooled rows."""
    decision = {"goal": "recall", "find": "class 3", "recall": 0.7, "confidence": 0.9}
    config = of_trees(tmp_path, decision=decision)
    names, sites = open_sites(tmp_path / "sites", config)
    result = federate(config, Wires(sites), names)
    expected = run(of_trees(tmp_path / "simulator", decision=decision, run={"seed": result.settings.run.seed}))
    assert result.folder is not None and expected.folder is not None
    there, here = (load_model(folder).decision for folder in (result.folder, expected.folder))
    assert there == here and there.promise is not None and there.sets
    for name in names:
        (folder,) = (tmp_path / "sites" / name / "agreements").glob("*/run")
        assert load_model(folder).decision == here, "every site has come to the same promise"
