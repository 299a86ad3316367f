"""Updates under masks: the server sees weighted sums, which are the plain ones up to rounding; whoever vanishes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtail.core.masks import Fixed
from fedtail.core.records import Task, Update
from fedtail.errors import FedtailError
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.sums import MASKED, ORDER
from fedtail.federate.protocol.transport import InProcess
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.server import federate
from fedtail.federate.site.data import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.methods import METHODS
from fedtail.models import build_model
from fedtail.rates import RATES
from fedtail.rounds.loop import train_rounds
from fedtail.rounds.state import Problem, State
from fedtail.settings import Settings

from .masked import Wires, blobs, job_for, masked_engine
from .test_masked_counts import rehearsal

MASKED_JOB = {"updates": "masked"}
CLUSTERS = {"labels": [0, 0, 0, 1, 1, 1], "cold_rounds": 1}


@pytest.fixture(scope="module")
def federation():
    return blobs(6)


def plain_engine(federation, method: str = "fedcgnm") -> RemoteEngine:
    n = federation.n_clients
    sites = {k: Site(f"s{k}", FederationSlice(federation, k), Policy(reveal="classes")).handle for k in range(n)}
    return RemoteEngine(InProcess(sites), job_for(federation, method, reveal="classes"), federation.sizes)


def train(engine: RemoteEngine, federation, rates: str = "uniform", **plan: Any) -> State:
    options = CLUSTERS if rates == "fedhoo_clusters" else {}
    strategy = RATES.build(rates, federation.n_clients, **options)
    problem = Problem(engine=engine, method=engine.job.build_method(), rates=strategy, n_classes=federation.n_classes)
    module = build_model("mlp", federation.input_shape, federation.n_classes, hidden=(8,))
    engine.model.load(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    return train_rounds(problem, Settings.of(rounds=3, seed=3, **plan), problem.begin())


def task_of(engine: RemoteEngine, round: int = 0, axes: np.ndarray | None = None) -> Task:
    n = engine.n_clients
    shares = engine.sizes / engine.sizes.sum()
    x = engine.model.vector.clone()
    rates = {"rate": np.full((n, 1), 0.6)}
    return Task(round=round, x=x, clients=tuple(range(n)), probes=rates, lr=0.1, weights=shares, axes=axes)


def mean(updates: list[Update], sizes: np.ndarray) -> torch.Tensor:
    """The plain weighted mean of some updates."""
    w = sizes[[u.client for u in updates]] / sizes[[u.client for u in updates]].sum()
    return sum(float(a) * u.delta.double() for a, u in zip(w, updates, strict=True))


@pytest.mark.parametrize(
    ("method", "rates"), [("fedcgnm", "uniform"), ("fedavg", "uniform"), ("fedcgnm", "fedhoo_clusters")]
)
def test_masked_rounds_are_the_plain_ones_up_to_rounding(federation, tmp_path: Path, method: str, rates: str) -> None:
    """FedHOO too: sums of both probes over clusters of three sites are all that it needs."""
    engine, _, wires = masked_engine(tmp_path, federation, job={"method": method, **MASKED_JOB})
    there, here = train(engine, federation, rates), train(plain_engine(federation, method), federation, rates)
    error = Fixed(64.0).error(6) if method == "fedavg" else Fixed(1.0).error(6)
    scale = float(here.x.abs().max())
    assert float((there.x - here.x).abs().max()) < 3 * (1000 * error + 1e-6 * scale)
    for a, b in zip(there.history, here.history, strict=True):
        assert a["rates"] == b["rates"] and a["clients"] == b["clients"] == list(range(6))
        assert a.get("reward") == b.get("reward") and "alignment" not in a
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
    replies = [unpack(reply) for phase, _, _, reply in wires.said if phase == "train"]
    assert {name for reply in replies for name in reply.tensors} == {MASKED}
    assert all(set(reply.meta) == {"round"} for reply in replies), "no steps, no loss, no samples of a site"


def test_the_sum_of_one_round_is_as_close_as_fixed_point_says(federation, tmp_path: Path) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    ((update,), refused) = engine.train(task_of(engine))
    exact, _ = plain_engine(federation).train(task_of(engine))
    order = next(unpack(asked).meta[ORDER] for phase, _, asked, _ in wires.said if phase == "train")
    worst = float((update.delta.double() - mean(exact, engine.sizes)).abs().max())
    float32 = float(update.delta.abs().max()) * 2**-23
    assert not refused and worst <= Fixed(order["limit"]).error(6) + float32 and order["limit"] < 64
    assert update.members == tuple(range(6)) and update.n_samples == engine.sizes.sum()


def vanish(wires: Wires, gone: dict[str, set[int]]) -> None:
    wires.tamper = lambda phase, k, asked, reply: None if k in gone.get(phase, ()) else reply


@pytest.mark.parametrize("gone", [{2}, {0, 4, 5}])
def test_sites_that_vanish_after_training_are_left_out_of_the_sum(federation, tmp_path: Path, gone: set[int]) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    vanish(wires, {"train": gone})
    ((update,), refused) = engine.train(task_of(engine))
    exact = [u for u in plain_engine(federation).train(task_of(engine))[0] if u.client not in gone]
    assert update.members == tuple(sorted(set(range(6)) - gone)) and {r.client for r in refused} == gone
    assert float((update.delta.double() - mean(exact, engine.sizes)).abs().max()) < 1e-6


def test_a_site_that_vanishes_before_the_sum_is_unmasked_makes_the_round_refused_not_wrong(
    federation, tmp_path: Path
) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    vanish(wires, {"unmask": {3}})
    updates, refused = engine.train(task_of(engine))
    assert updates == [] and {r.client for r in refused} == set(range(6))
    vanish(wires, {})
    ((again,), _) = engine.train(task_of(engine))  # the same round, once it is back
    exact = plain_engine(federation).train(task_of(engine))[0]
    assert float((again.delta.double() - mean(exact, engine.sizes)).abs().max()) < 1e-6
    vanish(wires, {"train": {3}})
    updates, refused = engine.train(task_of(engine))
    assert updates == [], "that round's sum with and without site 3 would be its update"
    ((later,), _) = engine.train(_moved(task_of(engine, 1)))
    assert later.members == (0, 1, 2, 4, 5), "in another round it may be missing"


def _moved(task: Task) -> Task:
    return Task(**{**vars(task), "x": task.x + 0.01})


def test_too_few_survivors_have_no_sum(federation, tmp_path: Path) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    vanish(wires, {"train": {0, 1, 2, 3}})
    updates, refused = engine.train(task_of(engine))
    assert updates == [] and {r.client for r in refused} == set(range(6))


def test_twenty_sites_of_which_six_vanish(tmp_path: Path) -> None:
    federation = blobs(20)
    engine, _, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    gone = {1, 4, 5, 11, 17, 19}
    vanish(wires, {"train": gone})
    ((update,), _) = engine.train(task_of(engine))
    exact = [u for u in plain_engine(federation).train(task_of(engine))[0] if u.client not in gone]
    assert len(update.members) == 14
    assert float((update.delta.double() - mean(exact, engine.sizes)).abs().max()) < 1e-6


# -- a server that cheats ------------------------------------------------------------------------------------


def deaf(site: Site, phase: str, parts: Parts) -> Parts:
    return {} if phase == "unmask" else site.handle(phase, parts)


def unmask(site: Site, engine: RemoteEngine, order: dict, left: list[str]) -> Parcel:
    told = {"job": engine.job.to_json(), "client": int(site.name[-2:]), ORDER: {**order, "members": left}}
    return unpack(site.handle("unmask", pack(Parcel(told))))


def test_every_sequence_that_would_unmask_one_site_is_refused(federation, tmp_path: Path) -> None:
    engine, sites, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    vanish(wires, {"unmask": set(range(6))})  # the server asks for all messages, and none of its requests leave
    wires.sites = {k: partial(deaf, site) for k, site in sites.items()}
    engine.train(task_of(engine))
    order = next(unpack(asked).meta[ORDER] for phase, _, asked, _ in wires.said if phase == "train")
    names, victim = order["members"], sites[0]
    for left in ([names[0]], names[:2], [*names[1:]], [*names, "eve"], []):
        assert "error" in unmask(victim, engine, order, left).meta
    assert "error" in unmask(victim, engine, {**order, "number": order["number"] + 1}, names).meta
    # The others are told that it vanished, it is told that all are there: its secrets need pieces that nobody gives.
    others = [unmask(sites[k], engine, order, names[1:]).meta["release"] for k in range(1, 6)]
    mine = unmask(victim, engine, order, names).meta["release"]
    assert all(names[0] not in release["pieces"] for release in others) and len(mine["pieces"]) == 5
    assert "error" in unmask(victim, engine, order, names).meta, "and a sum is unmasked once"
    assert "error" in unmask(sites[1], engine, order, names).meta


@pytest.mark.parametrize("lie", ["sizes", "small others", "probes", "weight", "clip"])
def test_a_site_refuses_orders_that_lie_about_it(federation, tmp_path: Path, lie: str) -> None:
    """With weights of the server's choice one site could be all of the sum; each checks what is said of itself, and all
    must have been told the same."""
    engine, sites, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)
    engine.train(task_of(engine))
    told = next(unpack(asked) for phase, k, asked, _ in wires.said if phase == "train" and k == 1)
    order = {**told.meta[ORDER], "number": told.meta[ORDER]["number"] + 10**6}
    me = "site-01"
    changed = {
        "sizes": {"sizes": {k: v for k, v in order["sizes"].items() if k != "site-05"}},
        "small others": {"sizes": {**order["sizes"], me: 1}},
        "probes": {"probes": {"rate": {**order["probes"]["rate"], me: [0.0]}}},
        "weight": {"cap": 0.0},
        "clip": {"clip": 1.0},
    }[lie]
    meta = {**told.meta, ORDER: {**order, **changed}, "task": {**told.meta["task"], "round": 1}}
    reply = unpack(sites[1].handle("train", pack(Parcel(meta, {**told.tensors, "x": told.tensors["x"] + 0.01}))))
    assert "error" in reply.meta and not reply.tensors


def test_the_same_round_asked_otherwise_is_refused(federation, tmp_path: Path) -> None:
    """Else the difference of two sums, one of them at a learning rate of zero for one site, is its update."""
    engine, _, _ = masked_engine(tmp_path, federation, job=MASKED_JOB)
    ((_,), _) = engine.train(task_of(engine))
    task = task_of(engine)
    task.probes["rate"][2] = 0.1
    updates, refused = engine.train(task)
    assert updates == [] and len(refused) == 6
    updates, _ = engine.train(Task(**{**vars(task_of(engine)), "round": 7}))
    assert updates == [], "nor the same model in another round"


def test_an_altered_message_makes_the_sum_refused(federation, tmp_path: Path) -> None:
    engine, _, wires = masked_engine(tmp_path, federation, job=MASKED_JOB)

    def tamper(phase: str, k: int, asked: Parts, reply: Parts) -> Parts:
        if phase != "train" or k != 2:
            return reply
        values = unpack(reply).tensors[MASKED].clone()
        values[7] += 1
        return pack(Parcel({"round": 0}, {MASKED: values}))

    wires.tamper = tamper
    updates, refused = engine.train(task_of(engine))
    assert updates == [] and all("do not cancel" in r.reason for r in refused)


# -- noise -----------------------------------------------------------------------------------------------------


def test_shares_of_noise_make_the_noise_of_the_sum_whoever_vanishes(federation, tmp_path: Path) -> None:
    """Two of six may vanish: four shares have the deviation that epsilon counts on, six have more."""
    job = {**MASKED_JOB, "shares": 1.0, "clip": 0.5, "dropouts": 0.34}
    noise, plain = [], plain_engine(federation)
    for i in range(12):
        engine, _, wires = masked_engine(tmp_path / str(i), federation, job=job)
        ((update,), _) = engine.train(task_of(engine))
        exact, w = [u.delta.double() for u in plain.train(task_of(engine))[0]], engine.sizes / engine.sizes.sum()
        cut = sum(float(a) * d * min(1.0, 0.5 / float(d.norm())) for a, d in zip(w, exact, strict=True))
        noise.append((update.delta.double() - cut).flatten().numpy())
    chance = 5 / np.sqrt(2 * np.concatenate(noise).size)  # five times what a deviation is uncertain by
    assert chance < 0.12, "four shares would not be told from six"
    assert np.concatenate(noise).std() == pytest.approx(0.5 * float(w.max()) * np.sqrt(6 / 4), rel=chance)
    vanish(wires, {"train": {0, 1, 2}})
    updates, _ = engine.train(_moved(task_of(engine, 1)))
    assert updates == [], "three shares are too little noise"


def test_epsilon_of_shares_is_that_of_central_noise(tmp_path: Path) -> None:
    names = ["north", "east", "south", "west"]
    sections = {"deploy": {"updates": "masked"}, "privacy": {"mode": "shares", "noise": 2.0}, "run": {"rounds": 2}}
    config, transport = rehearsal(tmp_path, names, **sections)
    result = federate(config, transport, names)
    from fedtail.core.privacy import gaussian_epsilon

    assert result.history[-1]["privacy"]["epsilon"] == gaussian_epsilon({2.0: 2}, 1e-5)
    assert torch.isfinite(result.x).all() and "alignment" not in result.history[0]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": {"name": "scaffold"}}, "method 'scaffold' needs more than sums"),
        ({"method": {"name": "climb"}}, "method 'climb' needs more than sums"),
        (
            {"rates": {"name": "fedhoo"}},
            "rates 'fedhoo' compare the updates of individual sites; use .*fedhoo_clusters",
        ),
        ({"rates": {"name": "fedhoo_clusters"}}, "clusters cannot come from updates"),
        ({"rates": {"name": "fast"}}, "need per-site numbers"),
        ({"deploy": {"compress": "int8"}}, "do not compress"),
        ({"privacy": {"mode": "local"}}, "works with privacy.mode = 'shares'"),
    ],
)
def test_what_needs_more_than_sums_is_refused_in_one_line(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    names = ["north", "east", "south"]
    deploy = {"updates": "masked", **sections.pop("deploy", {})}
    config, transport = rehearsal(tmp_path, names, deploy=deploy, **sections)
    with pytest.raises(FedtailError, match=said) as error:
        federate(config, transport, names)
    assert "\n" not in str(error.value)
    assert METHODS.build("fedavg").only_sums and METHODS.build("fedgrab").only_sums
