"""The same federation through the simulator and over a transport gives the same bits."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtail.core.decisions import POWERS, Decision, SiteGoal
from fedtail.core.records import Task
from fedtail.core.sampling import local_batches
from fedtail.data import DATASETS, Federation, partition
from fedtail.errors import FedtailError
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Errors, InProcess, Take
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.site.prepared import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rates.base import RateStrategy
from fedtail.rounds import aggregation
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.race import Race
from fedtail.rounds.state import Problem, State
from fedtail.runs.saved import read_decision
from fedtail.settings import Settings
from fedtail.simulate import simulator

K = 3
SETTINGS = Settings.of(epochs=1, batch_size=32, seed=3, path="reference")


class TwoProbe(RateStrategy):
    """Two fixed probes per client, all 2^K candidates, the best one wins: FedHOO's wire without its tree."""

    name = "two-probe"

    def __init__(self, n_clients: int) -> None:
        self.n_clients, self._choice = n_clients, np.zeros(n_clients, dtype=np.int64)

    def ask(self) -> np.ndarray:
        return np.tile([0.3, 0.7], (self.n_clients, 1))

    def patterns(self) -> str | None:
        return "binary"

    def tell(self, rewards=None, *, reports=None, present=None) -> int:
        winner = int(np.argmax(rewards))
        self._choice = (winner >> np.arange(self.n_clients)) & 1
        return winner

    @property
    def choice(self) -> np.ndarray:
        return self._choice

    @property
    def rates(self) -> np.ndarray:
        return self.ask()[np.arange(self.n_clients), self._choice]


@pytest.fixture(scope="module")
def federation() -> Federation:
    pooled = DATASETS.build("blobs", n_max=120, n_features=6, n_classes=4, spread=2.0)
    return partition(pooled.train, pooled.test, clients=K, classes=pooled.classes, transform=pooled.transform)


def job_for(federation: Federation, method: str = "fedcgnm", **more: object) -> Job:
    return Job(
        "test", "mlp", federation.input_shape, federation.classes, method, 3, {"hidden": (8,)},
        local=SETTINGS.local, seed=3, transform=federation.transform, **more,
    )  # fmt: skip


HOMES = tempfile.TemporaryDirectory()


def site(federation: Federation, k: int) -> Site:
    return Site(f"site {k}", FederationSlice(federation, k), Policy(), Path(tempfile.mkdtemp(dir=HOMES.name)))


def sites(federation: Federation) -> dict[int, Site]:
    return {k: site(federation, k) for k in range(K)}


def strategy(name: str) -> RateStrategy:
    return TwoProbe(K) if name == "two-probe" else RATES.build(name, K)


def run(engine, federation: Federation, method: str, rates: RateStrategy, **plan: object) -> State:
    problem = Problem(engine, METHODS.build(method), rates, federation.n_classes)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    engine.model.load(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    server = problem.method.init_server(K, federation.n_classes, engine.model.n_params)
    state = State(0, engine.model.vector.clone(), server)
    return train_rounds(problem, Settings.of(**{"rounds": 3, "seed": 3, **plan}), state)


def remote(federation: Federation, transport: object = None, method: str = "fedcgnm", **more: object) -> RemoteEngine:
    wires = transport or InProcess({k: s.handle for k, s in sites(federation).items()})
    quorum = more.pop("quorum", 1.0)
    job = job_for(federation, method)
    held = [len(federation.client(k).validation) for k in range(K)]
    return RemoteEngine(wires, job, federation.sizes, held, quorum=quorum, test=federation.test, **more)


@pytest.mark.parametrize("rates", ["uniform", "two-probe", "fedhoo"])
def test_simulator_and_transport_give_the_same_bits(federation: Federation, rates: str) -> None:
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    plain = simulator(federation, module, METHODS.build("fedcgnm"), SETTINGS)
    here = run(plain, federation, "fedcgnm", strategy(rates), diagnostics=("alignment",))
    there = run(remote(federation), federation, "fedcgnm", strategy(rates), diagnostics=("alignment",))
    assert torch.equal(here.x, there.x)
    for a, b in zip(here.history, there.history, strict=True):
        assert a["rates"] == b["rates"] and a["train_loss"] == b["train_loss"] and a["test"] == b["test"]
        assert a.get("reward") == b.get("reward") and a["alignment"] == b["alignment"]
        assert a["validation"]["accuracy"] == b["validation"]["accuracy"]
        assert repr(a["validation"]) == repr(b["validation"])


@pytest.mark.parametrize("method", ["fedcgnm", "scaffold"])
def test_sites_race_learning_rates_as_the_simulator_does(federation: Federation, method: str) -> None:
    """Every learning rate with a model of its own, for which sites keep what the method keeps."""
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    plain = simulator(federation, module, METHODS.build(method), SETTINGS)
    both = [
        run(engine, federation, method, Race(RATES.build("uniform", K)), rounds=18)
        for engine in (plain, remote(federation, method=method))
    ]
    here, there = (state.history for state in both)
    assert torch.equal(both[0].x, both[1].x)
    for a, b in zip(here, there, strict=True):  # sums of losses of the same models, in other batches
        assert all(x == pytest.approx(y, abs=1e-5) for x, y in zip(a.get("race", []), b.get("race", []), strict=True))
    names = {name for r in here for tried in r.get("race", []) for name in tried}
    assert names == {"lr", "reward", "log_loss"}


def test_sites_tell_a_search_the_class_balanced_loss(federation: Federation) -> None:
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    plain = simulator(federation, module, METHODS.build("fedcgnm"), SETTINGS)
    here = run(plain, federation, "fedcgnm", strategy("fedhoo"), metric="balanced_loss")
    there = run(remote(federation), federation, "fedcgnm", strategy("fedhoo"), metric="balanced_loss")
    assert [r["rates"] for r in here.history] == [r["rates"] for r in there.history]
    for a, b in zip(here.history, there.history, strict=True):
        assert a["reward"] == pytest.approx(b["reward"], rel=1e-5)
        assert a["validation"]["balanced_loss"] == pytest.approx(b["validation"]["balanced_loss"], rel=1e-5)


@pytest.mark.parametrize("rule", ["bounded", "krum"])
def test_rules_of_aggregation_give_the_same_bits_on_every_engine(
    federation: Federation, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "REACH", 0.5)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    server = {"aggregate": rule}
    found = []
    for path in ("reference", "batched"):
        engine = simulator(federation, module, METHODS.build("fedcgnm"), Settings.of(batch_size=32, seed=3, path=path))
        found.append(run(engine, federation, "fedcgnm", strategy("uniform"), server=server).x)
    there = run(remote(federation), federation, "fedcgnm", strategy("uniform"), server=server).x
    assert torch.equal(found[0], there)
    torch.testing.assert_close(found[1], there, rtol=1e-3, atol=1e-4)
    plain = run(remote(federation), federation, "fedcgnm", strategy("uniform")).x
    assert not torch.equal(plain, there)


def nan(parcel: Parcel) -> Parcel:
    return Parcel(parcel.meta, {**parcel.tensors, "delta": parcel.tensors["delta"] * float("nan")})


def wrong_shape(parcel: Parcel) -> Parcel:
    return Parcel(parcel.meta, {**parcel.tensors, "delta": parcel.tensors["delta"][:, 1:]})


def over_norm(parcel: Parcel) -> Parcel:
    return Parcel(parcel.meta, {**parcel.tensors, "delta": parcel.tensors["delta"] + 100.0})


def impostor(parcel: Parcel) -> Parcel:
    return Parcel({**parcel.meta, "update": {**parcel.meta["update"], "client": 0}}, parcel.tensors)


def inflated_steps(parcel: Parcel) -> Parcel:
    fields = {**parcel.meta["update"], "steps": [10**6]}
    return Parcel({**parcel.meta, "update": fields}, {**parcel.tensors, "delta": parcel.tensors["delta"] + 100.0})


def stale(parcel: Parcel) -> Parcel:
    return Parcel({**parcel.meta, "round": parcel.meta["round"] - 1}, parcel.tensors)


def no_runs(parcel: Parcel) -> Parcel:
    fields = {**parcel.meta["update"], "steps": [], "loss": []}
    return Parcel({**parcel.meta, "update": fields}, {**parcel.tensors, "delta": parcel.tensors["delta"][:0]})


def short_extra(parcel: Parcel) -> Parcel:
    return Parcel(parcel.meta, {k: v[:0] if "extra/" in k else v for k, v in parcel.tensors.items()})


def long_report(parcel: Parcel) -> Parcel:
    return Parcel(parcel.meta, {k: v.repeat(3) if "report/" in k else v for k, v in parcel.tensors.items()})


class Faulty:
    """An in-process transport on which client 1 misbehaves in round 1."""

    name = "faulty"

    def __init__(self, federation: Federation, fault: str) -> None:
        self.inner = InProcess({k: s.handle for k, s in sites(federation).items()})
        self.fault, self.rounds = fault, -1

    def exchange(self, phase: str, payloads: dict[int, Parts], timeout: float | None, take: Take) -> Errors:
        self.rounds += phase == "train"
        replies: dict[int, Parts] = {}
        errors = self.inner.exchange(phase, payloads, timeout, replies.__setitem__)
        if self.rounds == 1 and phase == "train":
            if self.fault == "dropout":
                del replies[1]
                errors[1] = "node 7 is gone"
            elif self.fault == "late":
                del replies[1]
            elif self.fault == "malformed":
                replies[1] = {"meta": b"{", "tensor/delta": b"\x00" * 40}
            elif self.fault == "huge":
                replies[1] = {"meta": b"{", "tensor/delta": bytes(50_000_000)}
            elif self.fault == "truncated":
                replies[1]["tensor/delta"] = replies[1]["tensor/delta"][:-8]
            else:
                replies[1] = pack(globals()[self.fault](unpack(replies[1])))
        for client, parts in reversed(replies.items()):
            take(client, parts)
        return errors


FAULTS = {
    "huge": "a message of 50.0 MB, at most 0.1 MB",
    "dropout": "node 7 is gone",
    "late": "no reply",
    "malformed": "its JSON cannot be read",
    "truncated": "is not as long as its header says",
    "nan": "not finite",
    "wrong_shape": "has shape",
    "over_norm": "exceeds the method's bound",
    "inflated_steps": "local steps is 1000000, possible are 0 to",
    "impostor": "reply is for client 0",
    "stale": "in round 0, expected client 1 in round 1",
    "no_runs": "has shape (0, ",
    "short_extra": "'control_change' of shape (0,), expected (1,)",
    "long_report": "has shape (3,), expected (1,)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_refused_with_its_reason_and_the_round_goes_on(federation: Federation, fault: str) -> None:
    method, rates = "scaffold" if "extra" in fault else "fedcgnm", "fast" if "report" in fault else "uniform"
    engine = remote(federation, Faulty(federation, fault), method)
    state = run(engine, federation, method, RATES.build(rates, K), quorum=0.5)
    assert [r["clients"] for r in state.history] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    (refused,) = state.history[1]["refused"]
    assert refused["client"] == 1 and FAULTS[fault] in refused["reason"]
    assert torch.isfinite(state.x).all()


def test_below_the_quorum_the_run_stops_and_says_who_is_missing(federation: Federation) -> None:
    with pytest.raises(FedtailError, match=r"but 3 are needed \(run.quorum = 1; client 1: node 7 is gone"):
        run(remote(federation, Faulty(federation, "dropout")), federation, "fedcgnm", RATES.build("uniform", K))


def test_order_of_arrival_does_not_change_the_model(federation: Federation) -> None:
    usual = run(remote(federation), federation, "fedcgnm", RATES.build("uniform", K))
    reversed_ = run(
        remote(federation, Faulty(federation, "identity")),
        federation, "fedcgnm", RATES.build("uniform", K),
    )  # fmt: skip
    assert torch.equal(usual.x, reversed_.x)


def identity(parcel: Parcel) -> Parcel:
    return parcel


def test_balanced_batches_of_a_skewed_site_are_not_too_many_steps(federation: Federation) -> None:
    """PCN+O takes the largest class B // C at a time: more steps than an epoch of C times the data can have."""
    engine = remote(federation, method="pcn_o")
    engine.job = replace(engine.job, local=Settings.of(batch_size=7).local)
    engine.sizes = np.array([1000, 1000, 1000])
    labels = np.repeat(np.arange(4), [970, 10, 10, 10])
    _, sizes = local_batches(labels, 0.5, np.random.default_rng(0), sampler="balanced", batch_size=7, epochs=1)
    steps = len(sizes)
    task = Task(0, engine.model.vector, (0,), {"rate": np.full((1, 1), 0.5)}, 0.1)
    assert steps <= engine._most_steps(0, task) <= 1000


@pytest.mark.parametrize("what", ["macro_f1", "balanced_accuracy"])
def test_sites_decide_for_themselves_as_the_simulator_would_and_keep_it(
    federation: Federation, tmp_path: Path, what: str
) -> None:
    goal = SiteGoal(
        common=Decision(temperature=1.2), goal=what, shares=(0.4, 0.3, 0.2, 0.1), curve=(0.5,) * len(POWERS)
    )
    there = remote(federation)
    x = there.model.vector.clone()
    here = simulator(federation, job_for(federation).build_model(), METHODS.build("fedavg"), SETTINGS)
    expected = here.site_decisions(x, goal)
    found = there.site_decisions(x, goal)
    assert found == expected and len(set(found.values())) == K
    for k in range(K):
        (tmp_path / str(k)).mkdir()
    kept = {k: Site(f"site {k}", FederationSlice(federation, k), Policy(), tmp_path / str(k)) for k in range(K)}
    assert remote(federation, InProcess({k: s.handle for k, s in kept.items()})).site_decisions(x, goal) == expected
    assert all(read_decision(tmp_path / str(k) / "decision.json", 4) == expected[k] for k in range(K))


def test_candidates_are_scored_over_a_federation_as_in_the_simulator(federation: Federation) -> None:
    there = run(remote(federation), federation, "fedcgnm", strategy("fedhoo"), metric="pr_auc")
    assert all("pr_auc" in r["validation"] and r["reward"] > 0 for r in there.history)
    here = simulator(federation, job_for(federation).build_model(), METHODS.build("fedcgnm"), SETTINGS)
    assert repr(run(here, federation, "fedcgnm", strategy("fedhoo"), metric="pr_auc").history) == repr(there.history)


@pytest.mark.parametrize(("quorum", "enough"), [(1.0, False), (0.6, True)])
def test_a_validation_that_too_few_sites_answer_ends_the_run(
    federation: Federation, quorum: float, enough: bool
) -> None:
    class Deaf(InProcess):
        """Client 0 trains, and answers nothing else."""

        def exchange(self, phase: str, payloads: dict, timeout: float | None, take: Take) -> Errors:
            deaf = {} if phase == "train" else {k: "no reply" for k in payloads if k == 0}
            return {
                **super().exchange(phase, {k: v for k, v in payloads.items() if k not in deaf}, timeout, take),
                **deaf,
            }

    wires = Deaf({k: s.handle for k, s in sites(federation).items()})
    engine = remote(federation, wires, quorum=quorum)
    if enough:
        assert len(run(engine, federation, "fedcgnm", strategy("two-probe"), rounds=2).history) == 2
    else:
        with pytest.raises(FedtailError, match="2 of 3 clients answered 'validate', but 3 are needed"):
            run(engine, federation, "fedcgnm", strategy("two-probe"), rounds=2)


def test_a_reply_that_no_reader_would_take_is_an_error_at_the_site(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    north = site(federation, 0)
    monkeypatch.setattr(north, "hello", lambda parcel: Parcel({"clock": int(1e308)}))
    assert unpack(north.handle("hello", pack(Parcel({})))).meta["error"] == "malformed"
