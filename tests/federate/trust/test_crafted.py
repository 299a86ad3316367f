"""What a server tries by what sites are asked to sign: settings that leave one site alone in a sum, that import code,
or that take the noise away; docs/threat-model.md refers to these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedtail.core.records import DIVERGED, Task
from fedtail.core.totals import LIMIT
from fedtail.data.federation import Federation
from fedtail.errors import FedtailError
from fedtail.federate import agreed, relay
from fedtail.federate.exchanges import Journal
from fedtail.federate.protocol import agreement
from fedtail.federate.protocol.job import job_of, method_of
from fedtail.federate.protocol.masks import PRIME, as_check, share_of_noise
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.member import SiteTotals, SumError
from fedtail.federate.site.own import ImageSite, TableSite
from fedtail.federate.site.prepared import FederationSlice, prepare
from fedtail.federate.statistics import column_moments
from fedtail.federate.summed import SummedEngine
from fedtail.runs.config import changed, check_config
from tests.totals import LocalTotals

from .loopback import Wires, make_folders, open_sites, settings, table_sites, write
from .test_blind import agreed_parties

NAMES = ["site-0", "site-1", "site-2"]


# -- one site alone in a sum ------------------------------------------------------------------------------------------


def engine_of(tmp_path: Path, sizes: tuple[int, ...] = (12, 90, 100), optimizer: str = "sgd") -> SummedEngine:
    """Three sites, of which the first has one batch, and all others several."""
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 5)).astype(np.float32), np.arange(n) % 3) for n in sizes]
    federation = Federation.from_arrays(parts, parts[0], validation=0.0)
    config = check_config(
        {"method": {"name": "fedavg"}, "model": {"name": "mlp", "hidden": [4]}, "deploy": {"trust": "blind"},
         "local": {"batch_size": 16, "optimizer": optimizer}}
    )  # fmt: skip
    data = {k: FederationSlice(federation, k) for k in range(3)}
    job = job_of(config, data[0].schema(), "run", "")
    owned = {k: prepare(one, job, k, tmp_path, torch.device("cpu")) for k, one in data.items()}
    totals, size = LocalTotals(3), np.array([float(sum(sizes))])
    return SummedEngine(totals, owned, owned[0].model, method_of(config), config, 3, size, "test")


def task_of(engine: SummedEngine, *rates: float) -> Task:
    x = engine.owned[0].job.build_model(1)
    start = torch.cat([p.detach().ravel() for p in x.parameters()])
    lr = np.tile(rates, (3, 1))
    racing = frozenset({DIVERGED}) if len(rates) > 1 else frozenset[str]()
    return Task(0, start, (0, 1, 2), {"rate": np.zeros_like(lr), "lr": lr}, rates[0], reports=racing)


def test_a_learning_rate_that_all_but_one_site_diverge_at_has_no_sum(tmp_path: Path) -> None:
    """With 10^30 whoever has one batch ends at a finite model, and others' losses overflow: were theirs left out, the
    sum would be that site's own gradient."""
    engine = engine_of(tmp_path)
    with pytest.raises(FedtailError, match="no sum can hold"):
        engine.train(task_of(engine, 1e30))


def test_in_a_race_a_learning_rate_that_is_lost_at_one_site_is_lost_at_all(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ((update,), _) = engine.train(task_of(engine, 0.1, 1e30))
    assert update.reports[DIVERGED].tolist() == [0.0, 1.0]
    assert update.delta[0].norm() > 0.01 and not update.delta[1].any(), "not the update of the one site that is left"
    with pytest.raises(FedtailError, match="diverges at every learning rate"):
        engine.train(task_of(engine, 1e30, 1e31))


def test_sites_are_not_told_apart_by_updates_that_are_cut(tmp_path: Path) -> None:
    """One batch each, and a learning rate at which all updates exceed the fixed point: cut to +-16 and weighed by
    sites' sizes, a sum of signs says the sign at each site."""
    engine = engine_of(tmp_path, (12, 14, 16))
    with pytest.raises(FedtailError, match="no sum can hold"):
        engine.train(task_of(engine, 1e30))


def test_a_sum_of_signs_tells_each_sites(tmp_path: Path) -> None:
    """Not prevented, and said so: one batch each under Adam, whose first step is a sign, and sites of different sizes.
    Sums themselves speak; noise alone bounds what they say."""
    engine, sizes = engine_of(tmp_path, (12, 14, 16), optimizer="adam"), np.array([12, 14, 16])
    ((update,), _) = engine.train(task_of(engine, 1.0))
    kinds = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)])
    apart = np.abs(update.delta[0].numpy()[:, None] - kinds @ sizes / sizes.sum())
    assert (apart.min(axis=1) < 1e-4).mean() > 0.9 and len(set(apart.argmin(axis=1).tolist())) > 3


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "key", "many"), [("run", "diagnostics", True), ("run", "metric", False)])
def test_nothing_in_a_document_is_imported(tmp_path: Path, section: str, key: str, many: bool) -> None:
    config, names, sites = table_sites(tmp_path)
    ran, code = tmp_path / "ran", tmp_path / "code.py"
    code.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef anything(*_): pass\n")
    document = agreed.write_document(config, agreed.declared_schema(config), names, "run")
    name = f"{code}:anything"
    document["settings"][section][key] = [name] if many else name
    reply = unpack(sites[0].handle(Phase.OFFER, pack(Parcel({"document": json.loads(json.dumps(document))}))))
    assert reply.meta == {"error": "policy-code"} and not ran.exists()


# -- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e15, 1e30, float("inf")])
def test_noise_that_no_sum_can_hold_is_not_taken_for_none(tmp_path: Path, noise: float) -> None:
    """Floats beyond 2^63 all become the same integer, and those of 10^30 end in zeros: exact sums for no epsilon."""
    make_folders(tmp_path, NAMES)
    party = agreed_parties(tmp_path, NAMES)["site-0"]
    totals = SiteTotals(party, [range(3)], Journal(tmp_path / "a" / "journal"), lambda n, answer: unpack(answer), noise)
    with pytest.raises(SumError, match="noise that no sum can hold"):
        totals.total(5, lambda k: np.arange(5), limit=LIMIT, reach=2.0)


def test_no_share_of_noise_is_rounded_away() -> None:
    """Of a hundred sites each adds a tenth of the deviation: .05 of a row would be none at any of them."""
    drawn = np.sum([share_of_noise(4000, 0.05, bytes([k] * 32), "share") for k in range(100)], axis=0)
    assert drawn.std() > 14


def test_noise_is_not_taken_for_numbers_of_a_column() -> None:
    """Little noise from many sites is more than the multiplier says; a size that nobody has would scale all by it."""

    class Noisy(LocalTotals):
        def total(self, size: int, part: Any, *, reach: Any = 1.0, **_: Any) -> np.ndarray:
            shares = (share_of_noise(size, 0.5 * reach / 5, bytes([k] * 32), "share") for k in range(25))
            return super().total(size, part) + sum(shares)

    columns = {k: [np.random.default_rng(k).normal(40, 5, 100)] for k in range(25)}
    known, _, mean, squares = column_moments(Noisy(25), columns, 1, noise=0.5)[0]
    assert abs(known - 2500) < 50 and abs(mean - 40) < 2 and abs(np.sqrt(squares / known) - 5) < 1


def test_the_same_exchange_has_the_same_noise(tmp_path: Path) -> None:
    """At a site whose folder was put back from a backup; else it would leave under one mask twice, for one price."""
    make_folders(tmp_path, NAMES)
    party, sent = agreed_parties(tmp_path, NAMES)["site-0"], []

    def answered(folder: str, values: Callable[[int], np.ndarray]) -> bytes:
        def ask(number: int, answer: Parts) -> Parcel:
            sent.append(answer)
            raise StopIteration

        totals = SiteTotals(party, [range(3)], Journal(tmp_path / folder / "journal"), ask, 5.0)
        with pytest.raises(StopIteration):
            totals.total(50, values, reach=7.0)
        return sent[-1]["tensor/masked"]

    ones, more = (lambda k: np.ones(50, dtype=np.int64)), (lambda k: np.arange(50))
    assert answered("before", ones) == answered("restored", ones)
    first, other = (np.frombuffer(answered(name, part)[-400:], "<i8") for name, part in (("a", ones), ("b", more)))
    assert (first - other != 1 - np.arange(50)).any(), "other values have other noise"


def first_exchange(tmp_path: Path, config: Any, data: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """(site 0's own vector, its reach) in the first exchange of a private run."""
    told: list[Any] = []

    def kept(self: Any, number: int, members: Any, size: int, part: Any, limit: int, reach: Any) -> Parts:
        told.append((np.asarray(part(self.here[0])), reach))
        raise FedtailError("enough")

    monkeypatch.setattr(SiteTotals, "_answer", kept)
    names, sites = open_sites(tmp_path / "sites", data, Policy(trust="private"))
    with pytest.raises(FedtailError):
        federate(changed(config, {"run.folder": str(tmp_path)}), Wires(sites), names)
    return told[0]


def moved(one: Any, other: Any) -> float:
    return float(np.linalg.norm((one[0] - other[0]) / one[1]))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (agreement, relay):
        monkeypatch.setattr(module, "seed_of", lambda name, numbers: 7)


PRIVATE: dict[str, Any] = {"deploy": {"trust": "private", "timeout": 30.0}, "privacy": {"mode": "shares", "noise": 1.0}}


def test_a_label_that_changes_moves_no_other_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None) -> None:
    """Rows held out class by class are others once one label is another; all of them would be in the difference."""
    config, _, _ = table_sites(tmp_path / "t", rows=300)
    config = check_config({**config.model_dump(exclude={"deploy", "privacy"}), **PRIVATE})
    frame = pd.read_csv(tmp_path / "t" / "0.csv")
    frame["age"] = frame.index + 1.0  # so that sizes tell which rows are there
    found = []
    for k, label in enumerate(("yes", "no")):
        frame.loc[7, "severe"] = label
        files = [write(frame, tmp_path / f"{k}.csv"), tmp_path / "t" / "1.csv", tmp_path / "t" / "2.csv"]
        data = {i: TableSite(file, tmp_path / "t" / "schema.toml") for i, file in enumerate(files)}
        found.append(first_exchange(tmp_path / str(k), config, data, monkeypatch))
    assert found[0][0].sum() > 300 and moved(*found) <= 1


def test_an_image_is_one_row_however_many_pixels_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    found = []
    named = {"name": "sites", "classes": ["cat", "dog"], "size": 8, "channels": 1}
    raw = settings(tmp_path, **PRIVATE).model_dump(exclude={"data", "model"})
    config = check_config({**raw, "data": named, "model": {"encoder": "none"}})
    for k, shade in enumerate((1, 255)):
        for i in range(24):
            folder = tmp_path / f"images-{k}" / ("cat" if i % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), shade if i == 11 else 40).save(folder / f"{i}.png")
        data = {i: ImageSite(tmp_path / f"images-{k}", ["cat", "dog"], 8, 1, test=0.0) for i in range(3)}
        found.append(first_exchange(tmp_path / str(k), config, data, monkeypatch))
    assert (found[0][0] != found[1][0]).any() and moved(*found) <= 1


# -- one answer -------------------------------------------------------------------------------------------------------


def test_two_processes_of_a_site_give_one_answer(tmp_path: Path) -> None:
    """One has read the data before they changed, one after, and both are asked at once: two answers under one mask
    would differ by what changed."""
    make_folders(tmp_path, NAMES)
    party, left = agreed_parties(tmp_path, NAMES)["site-0"], list[Parts]()

    def ask(number: int, answer: Parts) -> Parcel:
        left.append(answer)
        raise StopIteration

    def process(part: Callable[[int], np.ndarray]) -> None:
        totals = SiteTotals(party, [range(3)], Journal(tmp_path / "a" / "journal"), ask)
        with pytest.raises(StopIteration):
            totals.total(8, part)

    def meanwhile(client: int) -> np.ndarray:
        process(lambda k: np.arange(8) + 1)
        return np.arange(8)

    process(meanwhile)
    assert left[0] == left[1] and len(left) == 2
    assert 0 <= as_check(unpack(left[0]).meta["check"]) < PRIME


def test_a_folder_of_answers_is_on_disk_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("fedtail.federate.exchanges.sync", synced.append)
    Journal(tmp_path / "agreement" / "journal").write(1, {"a": b""})
    folder = tmp_path / "agreement"
    assert synced == [folder, tmp_path, folder / "journal"], "entries of all three, before an answer leaves"
