"""A run that goes on from an earlier one: sites come and go, the model and what it has cost stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtail import load_model
from fedtail.errors import FedtailError
from fedtail.federate.agreed import declared_schema, write_document
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.site import Site
from fedtail.settings import Settings

from .loopback import Wires, settings, table_sites

OLD, NEW = ["site-0", "site-1", "site-2"], ["site-1", "site-2", "site-3"]


def change_list(root: Path, names: list[str]) -> None:
    """Every site of the new list has the keys of all, as people have compared them."""
    listed = "".join((root / name / "site.pub").read_text() for name in names)
    for name in names:
        (root / name / "sites.pub").write_text(listed)


class Federation:
    """Sites 0, 1 and 2 have trained; then 0 leaves and 3 comes."""

    def __init__(self, root: Path, policy: dict[str, Any] | None = None, **sections: Any) -> None:
        self.root, self.sections = root, sections
        config, names, sites = table_sites(root, 4, 60, **(policy or {}))
        self.data = {name: sites[k].data for k, name in enumerate(names)}
        self.config, self.policy = config, Policy(**(policy or {}))
        change_list(root / "sites", OLD)
        self.first = federate(self.settings(name="first"), Wires(self.open(OLD)), OLD)
        change_list(root / "sites", NEW)

    def settings(self, after: str = "", **run: Any) -> Settings:
        raw = {**self.config.model_dump(), **self.sections}
        raw["run"] = {**raw["run"], "rounds": 2, **run}
        raw["deploy"] = {**raw["deploy"], **self.sections.get("deploy", {}), "after": after}
        return Settings(**raw)

    def open(self, names: list[str]) -> dict[int, Site]:
        folder = self.root / "sites"
        return {k: Site(name, self.data[name], self.policy, folder / name) for k, name in enumerate(names)}

    def give_model(self) -> None:
        """The operator of the new site has put the model's run folder into its ``models``."""
        assert self.first.folder is not None
        shutil.copytree(self.first.folder, self.root / "sites" / "site-3" / "models" / "first")

    def document(self, **after: Any) -> dict[str, Any]:
        config = self.settings(after="first", name="second")
        made = write_document(config, declared_schema(config), NEW, "second")
        made["after"] |= after
        return json.loads(json.dumps(made))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    made = Federation(tmp_path_factory.mktemp("successor"))
    with pytest.raises(FedtailError, match="site-3: it has not agreed"):
        federate(made.settings(after="first", name="early"), Wires(made.open(NEW)), NEW)
    made.give_model()
    return made


def test_sites_that_come_and_go_leave_the_model_and_its_preprocessing(trained: Federation) -> None:
    config = trained.settings(after="first", name="second", rounds=1)
    wires = Wires(trained.open(NEW))
    second = federate(config, wires, NEW)
    assert second.folder is not None and trained.first.folder is not None
    before, now = load_model(trained.first.folder), load_model(second.folder)
    assert now.preprocessing == before.preprocessing and now.classes == before.classes
    far = federate(trained.settings(name="apart", rounds=1), Wires(trained.open(NEW)), NEW)
    moved, fresh = (float((r.x - trained.first.x).norm()) for r in (second, far))
    assert 0 < moved < 0.5 * fresh, "one round from the model that was, and not from a new one"
    for name in NEW:
        homes = (trained.root / "sites" / name / "agreements").glob("*/run")
        finals = [torch.equal(load_model(home).module.state_dict()[k], v)
                  for home in homes for k, v in list(now.module.state_dict().items())[:1]]  # fmt: skip
        assert any(finals), "every site has come to it"


@pytest.mark.parametrize(
    "change",
    [
        {"agreement": "0" * 64},
        {"model": "0" * 64},
        {"sites": ["site-0", "site-1", "site-2", "site-9"]},
        {"sites": ["site-1", "site-2"]},
        {"sites": ["site-8", "site-9"]},
        {"sites": "site-1"},
        {"agreement": None},
    ],
    ids=str,
)
def test_a_run_that_names_another_predecessor_is_not_signed(trained: Federation, change: dict[str, Any]) -> None:
    sites = trained.open(NEW)

    def said(document: dict[str, Any]) -> list[dict[str, Any]]:
        asked = pack(Parcel({"document": document}))
        return [unpack(site.handle(Phase.OFFER, asked)).meta for site in sites.values()]

    assert all("offer" in one for one in said(trained.document()))
    found = said(trained.document(**change))
    assert {"error": "agreement"} in found and "error" in found[0], "a site that took part knows better"


def test_other_data_than_the_predecessors_are_not_signed(trained: Federation) -> None:
    document = trained.document()
    document["schema"]["classes"] = ["yes", "no"]
    reply = trained.open(NEW)[0].handle(Phase.OFFER, pack(Parcel({"document": document})))
    assert unpack(reply).meta == {"error": "agreement"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"deploy": {"trust": "server", "after": "first"}}, "goes on from a network that sites have agreed on"),
        ({"method": {"name": "trees"}, "deploy": {"after": "first"}}, "goes on from a network"),
        ({"deploy": {"after": "none"}}, "is no run that sites have agreed on"),
    ],
)
def test_what_has_no_successor_is_refused_in_one_line(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    config = settings(tmp_path, **sections)
    with pytest.raises(FedtailError, match=words):
        write_document(config, {}, OLD, "run")


def test_another_network_is_refused(trained: Federation) -> None:
    raw = trained.settings(after="first", name="wide").model_dump()
    wide = Settings(**{**raw, "model": {"name": "mlp", "hidden": [9]}})
    with pytest.raises(FedtailError, match="another network"):
        federate(wide, Wires(trained.open(NEW)), NEW)


def test_what_was_spent_before_counts_in_the_successor(tmp_path: Path) -> None:
    private = {"deploy": {"trust": "private"}, "privacy": {"mode": "shares", "noise": 20.0}}
    made = Federation(tmp_path, {"trust": "private", "max_epsilon": 50.0}, **private)
    made.give_model()
    spent = {name: sum(Ledger(tmp_path / "sites" / name).releases().values()) for name in NEW}
    assert spent["site-1"] > 0 and spent["site-3"] == 0
    federate(made.settings(after="first", name="second"), Wires(made.open(NEW)), NEW)
    after = {name: sum(Ledger(tmp_path / "sites" / name).releases().values()) for name in NEW}
    assert after["site-1"] - spent["site-1"] == after["site-3"] > 0, "the same account as before"
