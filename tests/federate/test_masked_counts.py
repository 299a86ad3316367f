"""Counts of validation under masks: the same bits as with every site's counts, and nothing of a single site."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.core.candidates import Candidates, binary_candidates
from fedtail.errors import FedtailError
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.operate.doctor import check_key
from fedtail.federate.operate.membership import own_key
from fedtail.federate.protocol.keys import new_secret, public_half, read_site_key, sign
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.sums import MASKED, ORDER
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.config import load_site
from fedtail.federate.site.data import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.federate.site.sums import SiteSums
from fedtail.runs.config import changed
from fedtail.runs.execution import run

from .conftest import settings
from .masked import blobs, certificates, create_deployment, job_for, make_folders, masked_engine


@pytest.fixture(scope="module")
def federation():
    return blobs(5)


def plain_engine(federation, clients=None) -> RemoteEngine:
    """The same with every site's own counts."""
    sites = {k: Site(f"s{k}", FederationSlice(federation, k), Policy(reveal="classes")).handle for k in range(5)}
    out = RemoteEngine(InProcess(sites), job_for(federation, reveal="classes"), federation.sizes)
    out.gone = set(range(5)) - set(range(5) if clients is None else clients)
    return out


def candidates(engine: RemoteEngine, axes: int = 3) -> Candidates:
    rng, x = torch.Generator().manual_seed(0), engine.model.vector.clone()
    deltas = [0.3 * torch.randn(2, x.numel(), generator=rng) for _ in range(5)]
    return binary_candidates(x, np.full(5, 0.2), deltas, np.arange(5) % axes, axes)


@pytest.mark.parametrize("how", ["affine", "models"])
def test_masked_sums_have_the_bits_of_class_counts(federation, tmp_path: Path, how: str) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, candidates=how)
    plain = plain_engine(federation)
    made, x = candidates(engine), engine.model.vector.clone()
    np.testing.assert_array_equal(engine.validate(made, range(5)), plain.validate(made, range(5)))
    for split in ("validation", "test"):
        np.testing.assert_array_equal(engine.confusion(x, split), plain.confusion(x, split))
    ((client, found),) = engine.scores(x, "validation")
    exact = [scores for _, scores in plain.scores(x, "validation")]
    assert client == -1 and found.n == len(federation.validation_rows())
    for name, value in vars(sum(exact[1:], exact[0])).items():
        np.testing.assert_array_equal(getattr(found, name), value)
    tensors = {name for phase, _, _, reply in wires.said if phase != "hello" for name in unpack(reply).tensors}
    assert tensors == {MASKED}, "nothing else leaves a site"


def test_what_leaves_a_site_is_random_and_new_in_every_sum(federation, tmp_path: Path) -> None:
    engine, _, wires = masked_engine(tmp_path, federation)
    x = engine.model.vector.clone()
    list(engine.scores(x, "validation"))
    list(engine.scores(x, "validation"))
    first, again = (
        unpack(reply).tensors[MASKED].numpy().view(np.uint64) for p, k, _, reply in wires.said[5:] if k == 2
    )
    assert len(first) > 30_000 and not (first == again).any()
    for values in (first, first - again):
        bits = (values[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
        assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(values))


def vanish(gone: set[int], phase: str, after: int = 0):
    """Sites whose replies to a phase are lost, after some were heard."""
    heard = dict.fromkeys(gone, 0)

    def tamper(asked_phase: str, k: int, asked: Parts, reply: Parts) -> Parts | None:
        if asked_phase != phase or k not in gone:
            return reply
        heard[k] += 1
        return reply if heard[k] <= after else None

    return tamper


def test_a_site_killed_in_mid_exchange_refuses_the_sum_rather_than_tell_of_it(federation, tmp_path: Path) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, quorum=0.5)
    x = engine.model.vector.clone()
    engine.confusion(x, "validation")
    wires.tamper = vanish({3}, "confusion")
    with pytest.raises(FedtailError, match=r"(?s)fewer than the quorum.*"):
        engine.confusion(x.clone(), "validation")
    assert any("site-03 alone" in str(f.reason) or "individual sites" in str(f.reason) for f in engine.faults)
    wires.tamper = lambda phase, k, asked, reply: reply
    np.testing.assert_array_equal(
        engine.confusion(x.clone(), "validation"), plain_engine(federation).confusion(x, "validation")
    )


def test_sites_that_allow_differences_go_on_with_the_sum_of_those_left(federation, tmp_path: Path) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, quorum=0.5, policy=Policy(differences="allow"))
    x = engine.model.vector.clone()
    wires.tamper = vanish({3}, "confusion")
    exact = plain_engine(federation, [0, 1, 2, 4])
    np.testing.assert_array_equal(engine.confusion(x, "validation"), exact.confusion(x, "validation"))
    engine.candidates, engine.models_per_message = "models", 3
    wires.tamper = vanish({1}, "validate", after=1)
    made = candidates(engine)
    np.testing.assert_array_equal(engine.validate(made, range(5)), exact.validate(made, [0, 2, 3, 4]))


def test_twenty_sites_of_which_six_vanish(tmp_path: Path) -> None:
    federation = blobs(20)
    engine, _, wires = masked_engine(tmp_path, federation, quorum=0.5)
    x = engine.model.vector.clone()
    whole = engine.confusion(x, "validation")
    wires.tamper = vanish({1, 4, 5, 11, 17, 19}, "confusion")
    left = engine.confusion(x.clone(), "validation")  # six sites together are enough not to be singled out
    sizes = [len(v) for v in federation.validation]
    assert whole.sum() == sum(sizes) and left.sum() == sum(
        n for k, n in enumerate(sizes) if k not in engine_gone(engine)
    )


def engine_gone(engine: RemoteEngine) -> set[int]:
    return {f.client for f in engine.faults}


# -- a server that cheats ------------------------------------------------------------------------------------


def ask(wires, site: Site, order: dict, x, job, phase: str = "confusion", **meta) -> Parcel:
    """A message of the server's own making."""
    told = {"job": job.to_json(), "client": int(site.name[-2:]), "splits": ["validation"], ORDER: order, **meta}
    return unpack(site.handle(phase, pack(Parcel(told, {"x": x}))))


def cheats(engine, sites, tmp_path: Path) -> dict[str, dict]:
    """Orders that a site must refuse."""
    good = engine.sums.order(range(5)).to_json()
    names = list(good["members"])

    def only(*kept: str) -> dict:
        return {**good, "members": kept, "adverts": {n: good["adverts"][n] for n in kept}}

    (tmp_path / "forger").mkdir()
    certificates.make_site_key(tmp_path / "forger", "site-01")
    key, public = read_site_key(tmp_path / "forger" / "site.key"), public_half(new_secret())
    mine = {"key": public.hex(), "signature": sign(key, "test", sites[0].sums.roster.digest, "site-01", public).hex()}
    unsigned = {"key": public.hex(), "signature": good["adverts"]["site-01"]["signature"]}
    strangers = {"members": (names[0], "eve", "mallory"), "adverts": {"eve": mine, "mallory": mine}}
    return {
        "alone": only(names[0]),
        "two": only(names[0], names[1]),
        "strangers": {**good, **strangers},
        "substituted key": {**good, "adverts": {**good["adverts"], "site-01": mine}},
        "unsigned key": {**good, "adverts": {**good["adverts"], "site-01": unsigned}},
        "no key": {**good, "adverts": {}},
        "without it": only(*names[1:]),
        "twice the same": {**good, "members": (names[0], names[1], names[1])},
        "an old number": {**good, "number": 1},
        "no order": {},
        "nonsense": {"number": "x", "members": 3},
    }


def test_orders_that_would_unmask_a_site_are_refused(federation, tmp_path: Path) -> None:
    engine, sites, wires = masked_engine(tmp_path, federation)
    x = engine.model.vector.clone()
    engine.confusion(x, "validation")
    for name, order in cheats(engine, sites, tmp_path).items():
        reply = ask(wires, sites[0], order, x, engine.job)
        assert "error" in reply.meta and not reply.tensors, name


def test_a_sum_with_and_without_a_site_is_refused_also_over_restarts_and_runs(federation, tmp_path: Path) -> None:
    """The difference of two sums over static data is the missing site's own counts, whoever adds what."""
    engine, sites, wires = masked_engine(tmp_path, federation)
    x = engine.model.vector.clone()
    engine.confusion(x, "validation")
    without = engine.sums.order(range(4)).to_json()
    site = sites[0]
    for again in (site, Site(site.name, site.data, site.policy, site.folder)):
        reply = ask(wires, again, without, x, engine.job)
        assert "error" in reply.meta
    three = ask(wires, site, engine.sums.order(range(3)).to_json(), x, engine.job)
    assert "error" in three.meta, "the two that are left out would be told of together"


def test_members_who_are_asked_different_things_have_no_sum(federation, tmp_path: Path) -> None:
    """One site gets a model that calls everything class 0: if masks cancelled, its class counts would show."""
    engine, _, wires = masked_engine(tmp_path, federation)
    x = engine.model.vector.clone()
    inner = wires._ask

    def crafted(client: int, phase: str, parts: Parts) -> Parts:
        if client == 2:
            parcel = unpack(parts)
            parts = pack(Parcel(parcel.meta, {"x": torch.zeros_like(parcel.tensors["x"])}))
        return inner(client, phase, parts)

    wires._ask = crafted
    with pytest.raises(FedtailError, match="masks do not cancel"):
        engine.confusion(x, "validation")


@pytest.mark.parametrize("what", ["altered", "replayed", "short", "another type"])
def test_altered_and_replayed_replies_are_refused(federation, tmp_path: Path, what: str) -> None:
    engine, _, wires = masked_engine(tmp_path, federation)
    x = engine.model.vector.clone()
    engine.confusion(x, "validation")
    old = next(reply for phase, k, _, reply in wires.said if phase == "confusion" and k == 2)

    def tamper(phase: str, k: int, asked: Parts, reply: Parts) -> Parts:
        if k != 2:
            return reply
        values = unpack(reply).tensors[MASKED].clone()
        if what == "altered":
            values[3] += 1
        elif what == "short":
            values = values[:-1]
        elif what == "another type":
            values = values.double()
        return old if what == "replayed" else pack(Parcel({}, {MASKED: values}))

    wires.tamper = tamper
    with pytest.raises(FedtailError, match=r"masks do not cancel|quorum"):
        engine.confusion(x.clone(), "validation")


def test_keys_stay_with_their_run_and_files_with_their_owner(federation, tmp_path: Path) -> None:
    make_folders(tmp_path, ["a", "b", "c"])
    site = SiteSums("a", Policy(), tmp_path / "a")
    first = site.advert("one")
    assert site.advert("one")["key"] == first["key"] and site.advert("two")["key"] != first["key"]
    kept = tmp_path / "a" / "sums.json"
    assert kept.stat().st_mode & 0o777 == 0o600 and json.loads(kept.read_text())["run"] == "two"
    assert SiteSums("a", Policy(), tmp_path / "a").advert("two")["key"] == site.advert("two")["key"]
    (tmp_path / "a" / "sites.pub").write_text((tmp_path / "b" / "site.pub").read_text())
    with pytest.raises(FedtailError, match="have different keys"):
        SiteSums("a", Policy(), tmp_path / "a")


# -- a whole run -----------------------------------------------------------------------------------------------


def rehearsal(root: Path, names: list[str], reveal: str = "sums", **sections):
    """A deployment's folders as ``deploy init`` makes them, and the sites in this process."""
    run = {"folder": str(root / "runs"), "validate_every": 1, **sections.pop("run", {})}
    config = settings(data={"clients": len(names)}, run=run, **sections)
    root.mkdir(exist_ok=True)
    deployment = create_deployment(root / "fed", tuple(names), config, port=9999)
    handles = {}
    for k, name in enumerate(names):
        file = deployment.site(name) / "site.toml"
        file.write_text(file.read_text().replace('reveal = "sums"', f'reveal = "{reveal}"'))
        handles[k] = load_site(file).open_site().handle
    return config, InProcess(handles)


def test_a_real_federation_tells_macro_f1_by_default_without_any_sites_counts(tmp_path: Path) -> None:
    names = ["north", "east", "south"]
    sections = {"run": {"metric": "macro_f1"}, "rates": {"name": "fedhoo", "cold_rounds": 1}}
    sections["server"] = {"aggregate": "mean", "max_weight": 1.0}  # as the simulator has it
    config, transport = rehearsal(tmp_path, names, **sections)
    there = federate(config, transport, names)
    here = run(changed(config, {"run.folder": str(tmp_path / "here"), "engine.path": "reference"}))
    assert torch.equal(there.x, here.x)
    for a, b in zip(there.history, here.history, strict=True):
        assert a["reward"] == b["reward"] and a["validation"]["macro_f1"] == b["validation"]["macro_f1"]
    said = json.loads((there.folder / "federation.json").read_text())
    assert said["reveal"] == "sums" and not there.sites and np.isfinite(there.test["macro_f1"])


def test_where_sums_are_not_possible_one_line_says_why(tmp_path: Path) -> None:
    config, transport = rehearsal(tmp_path / "pair", ["north", "east"])
    two = federate(config, transport, ["north", "east"])
    (line,) = [note for note in two.about.notes if "only totals" in note]
    assert "masked sums need at least 3 sites, but there are 2" in line
    three = ["north", "east", "south"]
    config, transport = rehearsal(tmp_path / "shy", three, "totals", deploy={"reveal": "sums"})
    with pytest.raises(FedtailError, match=r"'sums' is not possible: the policy of north does not allow sums"):
        federate(config, transport, three)
    config, transport = rehearsal(tmp_path / "few", three, run={"quorum": 0.6})
    assert any("lets sites be missing" in note for note in federate(config, transport, three).about.notes)


def test_a_site_makes_its_own_key_and_the_others_must_be_given_it(tmp_path: Path) -> None:
    """What ``deploy init`` made, the server has seen; with a new key, no sum until all lists have it."""
    names = ["north", "east", "south"]
    config, _ = rehearsal(tmp_path, names)
    before = own_key(tmp_path / "fed" / "sites" / "north")
    line, fingerprint, listed = own_key(tmp_path / "fed" / "sites" / "north", new=True)
    assert line != before[0] and fingerprint != before[1] and listed == sorted(names)
    assert [f.level for f in check_key(tmp_path / "fed" / "sites" / "north", "north")] == []
    folders = {name: tmp_path / "fed" / "sites" / name for name in names}
    transport = InProcess({k: load_site(folders[n] / "site.toml").open_site().handle for k, n in enumerate(names)})
    said = federate(config, transport, names).about.notes
    assert any("east has a different list of sites (sites.pub) from north" in note for note in said)
    for name in ("east", "south"):
        shutil.copy(folders["north"] / "sites.pub", folders[name] / "sites.pub")
        assert own_key(folders[name])[1] == fingerprint
    transport = InProcess({k: load_site(folders[n] / "site.toml").open_site().handle for k, n in enumerate(names)})
    assert federate(changed(config, {"run.name": "again"}), transport, names).summary["engine"]["reveal"] == "sums"
