"""Counts of a trained model at all sites, without training: the figures of the union of their rows, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.federate import counted
from fedtail.federate.agreed import digest_of
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.server import federate
from fedtail.federate.site.site import Site
from fedtail.runs.evaluate import evaluation
from fedtail.runs.judged import judge
from fedtail.runs.monitor import Seen, Watch
from fedtail.runs.saved import load_model
from fedtail.settings import Settings

from .loopback import Wires, table_sites, write


class Trained:
    """Three sites with tables, a model that they have agreed on, and later rows at each of them."""

    def __init__(self, root: Path, method: str = "fedcgnm") -> None:
        self.root = root
        config, self.names, self.sites = table_sites(root)
        raw = config.model_dump()
        raw["decision"] = {"goal": "recall", "find": "yes", "recall": 0.8}
        self.config: Settings = Settings(**raw)
        result = federate(self.config, Wires(self.sites), self.names)
        assert result.folder is not None
        self.run = result.folder
        self.new_rows(0, labels=True)

    def new_rows(self, seed: int, *, labels: bool, shift: float = 0.0) -> None:
        """Put other rows at every site, and all of them into ``all.csv``."""
        rng, parts = np.random.default_rng(seed), []
        for k, site in self.sites.items():
            y = rng.random(400 + 50 * k) < 0.3 + shift
            frame = pd.DataFrame(
                {
                    "age": 40 + 10 * y + rng.normal(0, 5, len(y)) + 40 * shift,
                    "stamp": 1.7e9 + rng.normal(3600 * y, 600, len(y)),
                    "ward": rng.choice(["a", "b", "c"], len(y)),
                    **({"severe": np.where(y, "yes", "no")} if labels else {}),
                }
            )
            site.data.new = write(frame, self.root / f"new-{k}.csv")  # type: ignore[attr-defined]
            parts.append(frame.assign(hospital=self.names[k]))
        write(pd.concat(parts), self.root / "all.csv")

    def ask(self, what: counted.What, trust: str = "blind", reference: Seen | None = None, **changes: Any) -> Any:
        question = counted.write_question(what, self.run, self.names, trust, reference)
        self.wires = Wires(self.sites)
        return counted.ask({**question, **changes}, self.wires, self.run, 30.0, reference)

    def union(self) -> Any:
        return judge(load_model(self.run), self.root / "all.csv", site="hospital")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("counted"))


def trusting(sites: Mapping[int, Site], level: str) -> None:
    for site in sites.values():
        site.policy, site._member = Policy(trust=level), None  # type: ignore[arg-type]


@pytest.fixture(params=["blind", "server"])
def trust(request: pytest.FixtureRequest, trained: Trained) -> Any:
    trusting(trained.sites, request.param)
    yield request.param
    trusting(trained.sites, "blind")


def test_an_evaluation_across_sites_is_that_of_the_union_of_their_rows(trained: Trained, trust: str) -> None:
    trained.new_rows(1, labels=True)
    found = trained.ask("evaluate", trust)
    assert isinstance(found, Scores) and found.n == 400 + 450 + 500
    classes = load_model(trained.run).classes
    assert evaluation(found, classes) == evaluation(trained.union().labelled.scores, classes)
    sums = [reply for asked, _, _, reply in trained.wires.said if asked == Phase.STEP]
    assert sum(any(name.startswith("tensor/") for name in reply) for reply in sums) == 3, "one vector of each site"


def test_monitoring_across_sites_is_that_of_the_union_of_their_rows(trained: Trained, trust: str) -> None:
    """A reference, a quiet look, and one after a shift: the same p-values and the same verdicts."""
    trained.new_rows(2, labels=True)
    there = Watch.of(
        trained.ask("reference", trust), ("no", "yes"), load_model(trained.run).preprocessing, ("yes", 0.8)
    )
    here = Watch.begin(trained.union(), ("yes", 0.8))
    assert there.reference.to_json() == here.reference.to_json() and there.inputs == here.inputs
    for seed, shift in ((3, 0.0), (4, 0.4)):
        trained.new_rows(seed, labels=bool(shift), shift=shift)
        ours = there.look(trained.ask("look", trust, there.reference))
        theirs = here.look(trained.union())
        assert ours.to_json() == theirs.to_json() and bool(ours.changed) == bool(shift)
    assert "input age" in ours.sentence()


def test_sites_count_for_no_model_but_one_that_they_have(trained: Trained, tmp_path: Path) -> None:
    """Whoever chooses the model chooses what is counted: a model that nobody agreed on is refused, by its hash."""
    chosen = tmp_path / "chosen"
    shutil.copytree(trained.run, chosen)
    about = json.loads((chosen / "model.json").read_text())
    about["decision"] = {**about["decision"], "bias": [3.0, -3.0]}
    (chosen / "model.json").write_text(json.dumps(about))
    before, trained.run = trained.run, chosen
    try:
        with pytest.raises(FedtailError, match="it has not agreed"):
            trained.ask("evaluate")
        assert not [1 for phase, *_ in trained.wires.said if phase != Phase.OFFER], "nothing was revealed or counted"
        for name in trained.names:
            shutil.copytree(chosen, trained.root / "sites" / name / "models" / "chosen")
        assert trained.ask("evaluate").n == len(pd.read_csv(trained.root / "all.csv")), "pinned by every operator"
    finally:
        trained.run = before


@pytest.mark.parametrize(
    "change",
    [
        {"what": "steal"},
        {"model": 7},
        {"sites": ["site-0", "site-1"]},
        {"trust": "server"},
        {"more": 1},
        {"fedtail": "9"},
    ],
)
def test_another_question_is_not_signed(trained: Trained, change: dict[str, Any]) -> None:
    question = {**counted.write_question("evaluate", trained.run, trained.names, "blind"), **change}
    with pytest.raises(FedtailError, match=r"policy|sites.pub|another form|other form|this site has"):
        trained.sites[0].member.offer(question)


def test_no_site_counts_without_noise_that_wants_noise(trained: Trained) -> None:
    """A question that says `private` passes a policy that asks for it, and its counts would be exact, and free."""
    question = {**counted.write_question("evaluate", trained.run, trained.names, "blind"), "trust": "private"}
    trusting(trained.sites, "private")
    try:
        with pytest.raises(FedtailError, match="it has not agreed"):
            counted.ask(question, Wires(trained.sites), trained.run, 30.0)
    finally:
        trusting(trained.sites, "blind")


def test_a_model_that_a_trusted_server_has_steered_is_not_agreed_on(trained: Trained, tmp_path: Path) -> None:
    """Sums of a run under `server` are the server's word, also at a site whose operator trusts it no longer."""
    home, digest = tmp_path / "site", digest_of(trained.run)
    shutil.copytree(trained.root / "sites" / trained.names[0], home)
    assert counted.find_model(home, digest).is_dir()
    for file in (home / "agreements").glob("*.json"):
        file.write_text(file.read_text().replace('"trust": "blind"', '"trust": "server"'))
    with pytest.raises(FedtailError, match="has not agreed on"):
        counted.find_model(home, digest)


def test_a_look_is_compared_with_the_reference_that_sites_have_counted_themselves(trained: Trained) -> None:
    """Else whoever names it chooses which rows count as strange."""
    trained.new_rows(2, labels=True)
    reference = trained.ask("reference")
    empty = reference.like(np.zeros_like(reference.flat()))
    with pytest.raises(FedtailError, match="it has not agreed"):
        trained.ask("look", reference=empty)
    assert trained.ask("look", reference=reference).n == reference.n


def test_what_cannot_be_asked_is_one_line(trained: Trained) -> None:
    with pytest.raises(FedtailError, match="carry no noise"):
        trained.ask("evaluate", "private")
    with pytest.raises(FedtailError, match="at least 3 sites"):
        counted.write_question("evaluate", trained.run, trained.names[:2], "blind")
    with pytest.raises(FedtailError, match="it trusts no server with this"):
        trained.ask("evaluate", "server")
    trained.sites[1].data.new = ""  # type: ignore[attr-defined]
    with pytest.raises(FedtailError, match="site-1: it cannot read its data"):
        trained.ask("evaluate")
    trained.new_rows(0, labels=False)
    with pytest.raises(FedtailError, match=r"it cannot read its data|it could not answer"):
        trained.ask("evaluate")
