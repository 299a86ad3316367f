"""What a hostile server tries on sites that do not trust it; docs/threat-model.md refers to these tests."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtail.data.tables.sketch import BINS
from fedtail.errors import FedtailError
from fedtail.federate import agreed
from fedtail.federate.agreed import DOCUMENT
from fedtail.federate.exchanges import Journal
from fedtail.federate.protocol.faults import CODES
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import AGREED, Phase
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.member import ANSWER
from fedtail.federate.site.site import Site
from fedtail.federate.statistics import common_preprocessing
from fedtail.runs.config import check_config
from fedtail.settings import Settings
from tests.totals import LocalTotals

from .loopback import RARE, Wires, make_folders, open_sites, settings, table_sites

PATH = Path(__file__).parents[3] / "benchmarks" / "reconstruction.py"
spec = importlib.util.spec_from_file_location("reconstruction", PATH)
assert spec is not None and spec.loader is not None
reconstruction = importlib.util.module_from_spec(spec)
sys.modules["reconstruction"] = reconstruction
spec.loader.exec_module(reconstruction)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, list[str], dict[int, Site]]:
    return table_sites(tmp_path_factory.mktemp("own"))


def said(site: Site, phase: str, **meta: Any) -> dict[str, Any]:
    return unpack(site.handle(phase, pack(Parcel(meta)))).meta


def document_for(config: Settings, names: list[str]) -> dict[str, Any]:
    return json.loads(json.dumps(agreed.write_document(config, agreed.declared_schema(config), names, "run")))


# -- questions of the server's own --------------------------------------------------------------------------------


def test_rows_are_read_from_a_crafted_model_where_the_server_is_trusted_and_it_is_not_answered_elsewhere() -> None:
    """Also not when it claims a later round: there is no round to claim."""
    rows = reconstruction.rows(650)
    assert reconstruction.attack(rows, "server").share > 0.6
    for round in (0, 5, 10**8):
        assert reconstruction.attack(rows, "blind", round=round) == reconstruction.Outcome(0.0, "refused: policy-trust")


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (Phase.HELLO, *AGREED)])
def test_a_site_that_trusts_no_server_answers_no_question_of_its_own(tmp_path: Path, phase: str) -> None:
    """No loss, no count, no statistic of a model or a request that the server chose."""
    site, federation = reconstruction.site_of(reconstruction.rows(40), Policy(), tmp_path)
    job = reconstruction.job_for(federation, units=4)
    x = reconstruction.FlatModel(job.build_model()).vector
    asked = Parcel(
        {"job": job.to_json(), "client": 0, "what": "train_loss", "splits": ["validation"], "split": "validation",
         "goal": {}, "request": {"client": 0, "seed": 0}},
        {"x": x},
    )  # fmt: skip
    if phase == Phase.TRAIN:
        asked = unpack(reconstruction.train_message(job, x))
    reply = unpack(site.handle(phase, pack(asked)))
    assert reply.meta["error"] in ("policy-trust", "malformed") and not reply.tensors


@pytest.mark.parametrize("trust", ["server", "blind", "private"])
@pytest.mark.parametrize("method", ["fedcgnm", "trees"])
def test_a_value_that_occurs_once_does_not_leave(tmp_path: Path, trust: str, method: str) -> None:
    """Neither in the proposal of a schema, which people share, nor in any message of a run, at every level."""
    config, names, sites = table_sites(tmp_path, trust=trust)
    assert RARE in (tmp_path / "0.csv").read_text()
    assert RARE not in (tmp_path / "schema.toml").read_text()
    privacy = {"mode": "shares", "noise": 0.01} if trust == "private" else {}
    network: dict[str, Any] = {} if method == "fedcgnm" else {"model": {}, "local": {}}
    raw = {**config.model_dump(exclude={"method", "deploy", "privacy", *network}), "method": {"name": method}}
    wires = Wires(sites)
    running = check_config({**raw, "deploy": {"trust": trust, "timeout": 30.0}, "privacy": privacy})
    if (trust, method) != ("private", "trees"):  # which is refused
        federate(running, wires, names)
        assert len(wires.said) > 12
    wires.exchange(Phase.HELLO, {0: pack(Parcel())}, 1.0, lambda k, parts: None)
    everything = b"".join(part for _, _, _, reply in wires.said for part in reply.values())
    assert RARE.encode() not in everything
    assert trust == "server" or b"ward" not in everything, "and no name of a column, but to a server that is trusted"


def test_a_bin_of_a_sketch_is_of_several_rows(own: Any) -> None:
    """What a site adds to a sum of sketches, before its masks: bins of at least ``min_count`` rows."""
    _, _, sites = own
    data, schema = sites[0].data, sites[0].data.schema()
    told: list[np.ndarray] = []

    class Listening(LocalTotals):
        def total(self, size: int, part: Any, **more: Any) -> np.ndarray:
            told.append(np.asarray(part(0)))
            return super().total(size, part, **more)

    common_preprocessing(Listening(1), schema, {0: data}, 0)
    assert data.min_count == 5 and told[-1].size == 2 * BINS
    assert set(told[-1][told[-1] > 0]) & set(range(5)) == set() and told[-1].sum() > 100


# -- the document -------------------------------------------------------------------------------------------------


def invent_classes(document: dict[str, Any]) -> None:
    document["schema"]["classes"] += [f"cell {i}" for i in range(50)]


def scale_a_column(document: dict[str, Any]) -> None:
    document["schema"]["table"]["columns"][0] |= {"mean": 40.0, "std": 1e-3}


def leave_a_site_out(document: dict[str, Any]) -> None:
    document["sites"] = document["sites"][:-1]


def add_a_site(document: dict[str, Any]) -> None:
    document["sites"].append("forged")


def choose_the_seed(document: dict[str, Any]) -> None:
    document["settings"]["run"]["seed"] = 7
    document["seed"] = 7


def send_a_model(document: dict[str, Any]) -> None:
    document["x"] = [0.0] * 8


def import_code(document: dict[str, Any]) -> None:
    document["settings"]["model"]["name"] = "subprocess:run"


def ask_for_updates(document: dict[str, Any]) -> None:
    document["settings"]["method"] = {"name": "scaffold"}


def pretend_noise(document: dict[str, Any]) -> None:
    """Bins of single rows would be told, which noise hides that nobody adds."""
    document["settings"]["privacy"]["mode"] = "shares"


def ask_for_no_noise(document: dict[str, Any]) -> None:
    document["trust"] = "private"


def drop_the_trust(document: dict[str, Any]) -> None:
    document["trust"] = "server"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (invent_classes, "agreement"),
        (scale_a_column, "agreement"),
        (leave_a_site_out, "agreement"),
        (add_a_site, "agreement"),
        (choose_the_seed, "agreement"),
        (send_a_model, "agreement"),
        (import_code, "policy-code"),
        (ask_for_updates, "site"),
        (pretend_noise, "site"),
        (ask_for_no_noise, "site"),
        (drop_the_trust, "policy-trust"),
    ],
)
def test_a_document_that_is_not_what_sites_agreed_on_is_not_signed(change: Any, code: str, own: Any) -> None:
    config, names, sites = own
    document = document_for(config, names)
    assert "offer" in said(sites[0], Phase.OFFER, document=document)
    change(document)
    assert said(sites[0], Phase.OFFER, document=document) == {"error": code}


@pytest.mark.parametrize(("change", "what"), [(invent_classes, "classes"), (scale_a_column, "table")])
def test_a_site_says_in_its_audit_what_of_a_document_is_other(change: Any, what: str, own: Any) -> None:
    config, names, sites = own
    document = document_for(config, names)
    change(document)
    said(sites[0], Phase.OFFER, document=document)
    last = json.loads((sites[0].folder / "audit.jsonl").read_text().splitlines()[-1])
    assert what in last["reason"].partition("other data than this site has; other: ")[2]


def test_clusters_of_a_list_of_sites_stay_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the lines of the Fano plane, each harmless alone, would count every one of seven sites."""
    synced: list[Path] = []
    monkeypatch.setattr("fedtail.federate.exchanges.sync", synced.append)
    labels = ["a", "a", "a", "b", "b", "b", "b"]
    config = settings(tmp_path, 7, rates={"name": "fedhoo_clusters", "labels": labels, "cold_rounds": 1})
    names, sites = open_sites(tmp_path / "sites", config)
    document = document_for(config, names)
    assert "offer" in said(sites[0], Phase.OFFER, document=document)
    assert len(synced) == 2, "the entry of the clusters is on disk, as that of the offer is"
    assert "offer" in said(sites[0], Phase.OFFER, document=document), "again, as they were"
    for other in (["a", "b", "b", "a", "a", "b", "b"], ["a", "b", "b", "b", "a", "a", "b"]):
        document["settings"]["rates"]["labels"] = other
        assert said(sites[0], Phase.OFFER, document=document) == {"error": "agreement"}
    document["settings"]["rates"]["labels"] = ["a", "a", "b", "b", "b", "b", "b"]
    assert said(sites[0], Phase.OFFER, document=document) == {"error": "site"}, "a cluster of two"


# -- sums -----------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def forging(tmp_path: Path, forge: Any, **sections: Any) -> str:
    """The words in which a run ends whose server forges questions to site 1."""
    config = settings(tmp_path, **sections)
    names, sites = open_sites(tmp_path / "sites", config)
    wires = Wires(sites)

    def changed(phase: str, client: int, parts: Parts) -> Parts:
        if phase != Phase.STEP or client != 1:
            return parts
        parcel = unpack(parts)
        return pack(forge(parcel) or parcel)

    wires.forge = changed
    with pytest.raises(FedtailError) as error:
        federate(config, wires, names)
    return str(error.value)


def move_by_an_ulp(parcel: Parcel) -> Parcel:
    """Of the sum that came back, which stands for the model."""
    tensors = {k: v.clone() for k, v in parcel.tensors.items()}
    if parcel.meta["number"] > 3:
        for value in tensors.values():
            value[0] += 1
    return Parcel(parcel.meta, tensors)


def another_check(parcel: Parcel) -> Parcel:
    checks = [hex(int(c, 16) + 1) for c in parcel.meta.get("checks", [])]
    return Parcel({**parcel.meta, "checks": checks} if checks else parcel.meta, parcel.tensors)


def a_model_instead(parcel: Parcel) -> Parcel:
    tensors = {name: torch.zeros_like(value) for name, value in parcel.tensors.items()}
    return Parcel(parcel.meta, tensors)


@pytest.mark.parametrize("forge", [move_by_an_ulp, another_check, a_model_instead])
def test_a_site_goes_no_further_with_a_sum_that_is_not_the_sites(tmp_path: Path, forge: Any) -> None:
    assert "site-1: the sum that came back is not the sum of what the sites sent" in forging(tmp_path, forge)


def test_a_server_that_skips_an_exchange_gets_no_answer(tmp_path: Path) -> None:
    def later(parcel: Parcel) -> Parcel:
        return Parcel({**parcel.meta, "number": parcel.meta["number"] + 5}, parcel.tensors)

    assert "site-1: it is at another exchange" in forging(tmp_path, later)


def test_a_sum_without_one_site_is_not_believed(tmp_path: Path) -> None:
    """The server adds up two of three: what comes out is random, and the sites say so."""
    config = settings(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    wires = Wires(sites)

    def zeroed(phase: str, client: int, asked: Parts, reply: Parts) -> Parts:
        parcel = unpack(reply)
        if phase != Phase.STEP or client != 2 or "masked" not in parcel.tensors:
            return reply
        return pack(Parcel({**parcel.meta, "check": "0x0"}, {"masked": torch.zeros_like(parcel.tensors["masked"])}))

    wires.tamper = zeroed
    with pytest.raises(FedtailError, match="not the sum of what the sites sent"):
        federate(config, wires, names)


def test_an_exchange_has_one_answer_also_after_a_restart(tmp_path: Path) -> None:
    """A site that was killed after its answer to exchange 4: it says the same again, and with other rows nothing."""
    config = settings(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    wires, said = Wires(sites), []

    def kept(phase: str, client: int, asked: Parts, reply: Parts) -> Parts:
        if phase == Phase.STEP and client == 1:
            said.append((asked, reply))
        if len(said) == 4:
            raise Stop
        return reply

    wires.tamper = kept
    with pytest.raises(Stop):
        federate(config, wires, names)
    asked, reply = said[3]
    _, changed = open_sites(tmp_path / "sites", settings(tmp_path, data={"seed": 4}))
    silent = unpack(changed[1].handle(Phase.STEP, asked))
    assert silent.meta == {"error": "changed"} and not silent.tensors
    _, again = open_sites(tmp_path / "sites", config)
    assert again[1].handle(Phase.STEP, asked) == reply == again[1].handle(Phase.STEP, asked)
    old = unpack(again[1].handle(Phase.STEP, said[1][0]))
    assert old.meta == {"error": "repeat"} and not old.tensors, "an old question has no second answer"


def test_no_answer_leaves_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    wires, write = Wires(sites), Journal.write
    left: list[int] = []

    def watched(self: Journal, number: int, parts: Parts) -> None:
        if any(name.startswith(ANSWER) for name in parts) and number == 4:
            raise OSError(28, "No space left on device")
        write(self, number, parts)

    def heard(phase: str, client: int, asked: Parts, reply: Parts) -> Parts:
        if phase == Phase.STEP and "tensor/masked" in reply:
            left.append(unpack(reply).meta["number"])
        if unpack(reply).meta.get("error") == "disk":
            raise Stop
        return reply

    monkeypatch.setattr(Journal, "write", watched)
    wires.tamper = heard
    with pytest.raises(Stop):
        federate(config, wires, names)
    assert max(left) == 3


def test_nothing_of_one_run_serves_the_next(tmp_path: Path) -> None:
    """Not a seed, not an initial model, not a mask: a server that moves x0 by an ulp, or cuts a site off and begins
    again, has nothing that fits together."""
    config = settings(tmp_path, run={"rounds": 1})
    names, sites = open_sites(tmp_path / "sites", config)
    runs, sent = [], []
    for _ in range(2):
        wires = Wires(sites)
        result = federate(config, wires, names)
        assert result.folder is not None
        runs.append(json.loads((result.folder / DOCUMENT).read_text()))
        sent.append(next(r for p, k, _, r in wires.said if p == Phase.STEP and k == 0))
    assert runs[0]["seed"] != runs[1]["seed"] and runs[0]["agreement"] != runs[1]["agreement"]
    assert sent[0] != sent[1], "the same counts of the same data, under other masks"


def test_a_list_with_another_key_is_another_federation(tmp_path: Path) -> None:
    """`deploy add` at the server changes no site's list, and a site whose list was changed is heard of."""
    config = settings(tmp_path)
    names, sites = open_sites(tmp_path / "sites", config)
    make_folders(tmp_path / "forged", names)
    for file in ("site.key", "site.pub", "sites.pub"):
        (tmp_path / "sites" / "site-2" / file).write_bytes((tmp_path / "forged" / "site-2" / file).read_bytes())
    _, sites = open_sites(tmp_path / "sites", config)
    with pytest.raises(FedtailError, match="documents, signatures or lists of sites differ"):
        federate(config, Wires(sites), names)


def test_a_class_with_one_sample_is_in_a_sum_and_nowhere_else(tmp_path: Path) -> None:
    """Every number that a site sends of its data is masked: two runs over the same data have no byte in common but by
    chance."""
    config, names, sites = table_sites(tmp_path / "own")
    wires = Wires(sites)
    federate(config, wires, names)
    for phase, _, _, reply in wires.said:
        found = unpack(reply)
        if phase != Phase.STEP:
            assert not found.tensors and set(found.meta) <= {"offer", "number", "shares"}
            continue
        assert set(found.meta) in ({"number", "check"}, {"done"}) and set(found.tensors) <= {"masked"}
        for value in found.tensors.values():
            data = np.frombuffer(value.numpy().tobytes(), dtype=np.uint8)
            assert len(data) < 64 or (np.bincount(data, minlength=256).max() < 12 + len(data) / 256 * 1.8)


# -- messages -------------------------------------------------------------------------------------------------------


def test_a_message_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    site, _ = reconstruction.site_of(reconstruction.rows(40), Policy(max_message_mb=1), tmp_path)
    assert unpack(site.handle("train", {"meta": b"{}", "tensor/x": bytes(2_000_000)})).meta["error"] == "policy-size"


def test_no_word_of_an_error_leaves_a_site(tmp_path: Path) -> None:
    _, federation = reconstruction.site_of(reconstruction.rows(40), Policy(), tmp_path)

    class Broken(reconstruction.Own):  # type: ignore[misc, name-defined]
        def client(self, index: int, job: Any) -> Any:
            raise ValueError("row 17: Jane Doe, born 1971 \x1b[31m" + "x" * 5_000_000)

    victim = Site("north", Broken(federation, 0), Policy(trust="server"), tmp_path)
    job = reconstruction.job_for(federation, units=4)
    reply = victim.handle("train", reconstruction.train_message(job, torch.zeros(3)))
    assert unpack(reply).meta["error"] in CODES and sum(map(len, reply.values())) < 200
    kept = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])
    assert "Jane Doe" in kept["reason"] and "\x1b" not in kept["reason"] and len(kept["reason"]) <= 1000
