"""A real Flower federation on loopback: TLS, authenticated sites, one process per message, and what goes wrong."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.cli import app
from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.flower import SITE
from fedtail.federate.operate import local, membership, processes, runs
from fedtail.federate.operate.certificates import make_ca, make_site_key
from fedtail.federate.operate.control import Control, wait_until_healthy
from fedtail.federate.operate.create import create_deployment
from fedtail.federate.operate.processes import flower_environment, free_port, supernode_command
from fedtail.federate.protocol.transport import split_phase
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.site import frames
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import open_site
from fedtail.federate.site.worker_client import WORKER
from fedtail.report import load_run, write_report
from fedtail.rounds.race import LRS
from fedtail.runs.config import changed
from fedtail.runs.execution import run
from fedtail.runs.record import read_history
from fedtail.settings import Settings
from tests.federate.conftest import find_nginx, settings, through_the_proxy
from tests.federate.gate import Gate
from tests.waiting import HANGS, until

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]


def start(deployment: Deployment, config: Settings, **options: Any) -> int:
    deployment.config.write_text(changed(config, {"run.folder": str(deployment.runs)}).to_toml())
    if not options.get("resume"):
        runs.stop(deployment)  # one that a test has left when it failed
    return runs.start(deployment, **options)


def assert_simulators_model(folder: Path, config: Settings, tmp_path: Path) -> None:
    """Bit by bit the model the reference simulator trains, and the same history."""
    here = run(changed(config, {"run.folder": str(tmp_path), "engine.path": "reference"})).folder
    assert here is not None
    ours, theirs = load_file(here / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for a, b in zip(read_history(here), read_history(folder), strict=True):
        assert b["test"] == {name: a["test"][name] for name in b["test"]}
        assert a["rates"] == b["rates"] and a["train_loss"] == b["train_loss"] and a.get("reward") == b.get("reward")
        assert b["refused"] == [] and b["faults"] == []


def test_flower_gives_the_same_model_as_the_simulator(flower_deployment: Deployment, tmp_path: Path) -> None:
    config = settings(run={"name": "uniform"})
    folder = Path(runs.wait(flower_deployment, start(flower_deployment, config))["folder"])
    assert_simulators_model(folder, settings(run={"name": "uniform"}), tmp_path)


def test_fedhoo_killed_with_its_server_and_resumed_gives_the_simulators_model(
    flower_deployment: Deployment, tmp_path: Path
) -> None:
    """SIGKILL to the SuperLink and all it started, in the middle of round 1; sites stay up and find it again."""
    hoo = {"name": "fedhoo", "cold_rounds": 0}
    config = settings(rates=hoo, run={"name": "hoo"})
    folder = flower_deployment.runs / "hoo"
    start(flower_deployment, config)
    until(lambda: len(read_history(folder)) == 1, "round 0")
    while left := processes.find(flower_deployment.folder, "superlink"):
        for process in left:
            processes.send_signal(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    local.start_superlink(flower_deployment)
    wait_until_healthy(flower_deployment, HANGS, flower_deployment.server / "superlink.log")
    local.wait_until_online(flower_deployment, HANGS)
    runs.wait(flower_deployment, start(flower_deployment, config, resume=True))
    assert [r["round"] for r in read_history(folder)] == [0, 1, 2]
    assert read_history(folder)[-1]["search"]
    assert_simulators_model(folder, settings(rates=hoo, run={"name": "hoo"}), tmp_path)


def test_a_race_of_learning_rates_over_real_sites_is_the_simulators_bit_by_bit(
    flower_deployment: Deployment, tmp_path: Path
) -> None:
    """Each learning rate has a model of its own, which sites train and validate in processes of their own."""
    config = settings(local={"batch_size": 32, "lr": "auto"}, run={"name": "race", "rounds": 8})
    folder = Path(runs.wait(flower_deployment, start(flower_deployment, config))["folder"])
    assert_simulators_model(folder, config, tmp_path)
    here, there = (json.loads((f / "result.json").read_text())["found"] for f in (tmp_path / "race", folder))
    assert here == there and there["lr"] in LRS["sgd"]
    ours, theirs = (
        [tried for r in read_history(f) for tried in r.get("race", [])] for f in (tmp_path / "race", folder)
    )
    assert len(theirs) == 5  # three, then two
    for a, b in zip(ours, theirs, strict=True):
        # sites compute scores in batches of their own, so their last digits differ
        assert (a["lr"], a["reward"]) == (b["lr"], b["reward"]) and a["log_loss"] == pytest.approx(b["log_loss"])


class Liar:
    """What a site's worker says instead of the truth: a different lie in each round, then the truth."""

    def __init__(self, timeout: float, folder: Path) -> None:
        self.folder, self.last = folder, {}
        self.lies: list[tuple[Callable[[Parcel], Parcel | Parts], str]] = [
            (self.nan, "not finite"),
            (self.garbage, "its JSON cannot be read"),
            (self.late, f"no reply within {timeout:g} s"),
            (self.wrong_shape, "has shape"),
            (self.over_norm, "exceeds the method's bound"),
            (self.impossible_steps, "local steps is 1000000, possible are"),
            (self.replayed, "reply is for client 2 in round 5, expected client 2 in round 6"),
        ]

    def __call__(self, round: int, reply: Parts) -> Parts:
        truth = unpack(reply)
        said = self.lies[round][0](truth) if round < len(self.lies) else truth
        self.last = truth
        return pack(said) if isinstance(said, Parcel) else said

    def nan(self, truth: Parcel) -> Parcel:
        return Parcel(truth.meta, {**truth.tensors, "delta": truth.tensors["delta"] * float("nan")})

    def garbage(self, truth: Parcel) -> Parts:
        return {"meta": b"{", "tensor/delta": b"\x00" * 64}

    def late(self, truth: Parcel) -> Parcel:
        done = len(read_history(self.folder))
        until(lambda: len(read_history(self.folder)) > done, "the round to end without south")
        return truth

    def wrong_shape(self, truth: Parcel) -> Parcel:
        return Parcel(truth.meta, {**truth.tensors, "delta": truth.tensors["delta"][:, 1:]})

    def over_norm(self, truth: Parcel) -> Parcel:
        return Parcel(truth.meta, {**truth.tensors, "delta": truth.tensors["delta"] + 100.0})

    def impossible_steps(self, truth: Parcel) -> Parcel:
        fields = {**truth.meta["update"], "steps": [10**6]}
        return Parcel({**truth.meta, "update": fields}, {**truth.tensors, "delta": truth.tensors["delta"] + 100.0})

    def replayed(self, truth: Parcel) -> Parcel:
        return self.last


@contextmanager
def lying_worker(site_file: Path, lie: Callable[[int, Parts], Parts]) -> Iterator[None]:
    """Take the place of a site's worker: honest answers, except that ``lie`` may change those to ``train``."""
    site = open_site(load_site(site_file))
    address = frames.socket_path(site_file)
    for process in processes.find(site_file.parents[2]):
        if " ".join(WORKER) in process.command and str(site_file) in process.command:
            processes.send_signal(process.pid, signal.SIGKILL)
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    listener.listen(4)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):  # nobody waits for a late reply
                phase, parts = split_phase(frames.receive(connection))
                reply = site.handle(phase, parts)
                if phase == "train":
                    reply = lie(unpack(parts).meta["task"]["round"], reply)
                frames.send(connection, reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        address.unlink(missing_ok=True)


def bring_back(deployment: Deployment, site: str) -> None:
    """Start a site that was killed; its service tries again until Flower lets it in, once its last heartbeat has
    expired."""
    local.start_site(deployment, site, through_the_proxy(deployment))


def leave(deployment: Deployment, site: str) -> None:
    """Stop a site's service, which signs off; returns once Flower has noticed."""
    processes.stop(deployment.folder, f"site:{site}")
    with Control(deployment) as control:
        until(lambda: control.nodes()[site] != "online", "Flower to notice")


@pytest.mark.faults
def test_killed_late_and_lying_sites_are_left_out_with_their_reasons_and_come_back(
    flower_deployment: Deployment,
) -> None:
    """``south`` lies in rounds 0 to 6, one of them by being late; ``east`` is killed in round 1, started again and
    back before the end; the run has all its rounds, and history, status and report say what happened.

    A second reply to one message cannot be provoked here: a ClientApp returns one, and Flower takes one per message.
    The transport would ignore it (test_transport.py). A reply sent again in a later round can.
    """
    rounds, timeout = 24, 90.0
    config = settings(
        run={"name": "faults", "rounds": rounds, "quorum": 0.3}, deploy={"timeout": timeout, "validate_every": 0}
    )
    folder = flower_deployment.runs / "faults"
    liar = Liar(timeout, folder)
    with lying_worker(flower_deployment.site("south") / "site.toml", liar):
        run_id = start(flower_deployment, config)
        until(lambda: len(read_history(folder)) == 1, "round 0")
        for process in processes.find(flower_deployment.folder, "site:east"):
            processes.send_signal(process.pid, signal.SIGKILL)
        bring_back(flower_deployment, "east")
        done = runs.wait(flower_deployment, run_id)
    records = read_history(folder)
    assert [r["round"] for r in records] == list(range(rounds))
    reasons = [{f["client"]: f["reason"] for f in r["refused"]} for r in records]
    for round, (_, reason) in enumerate(liar.lies):
        assert reason in reasons[round][2], f"south in round {round}"
    assert all(2 in r["clients"] for r in records[len(liar.lies) :]), "the truth is believed again"
    assert 1 in reasons[1], "east was killed in round 1"
    assert 1 in records[-1]["clients"], "east is back"
    assert all(0 in r["clients"] for r in records), "north was always there"
    assert json.loads((folder / "result.json").read_text())["refused"] == sum(map(len, reasons))
    assert {f["client"] for f in done["errors"]} == {1, 2}, "status shows what happened"
    page = html.unescape(write_report([load_run(folder)], folder / "report.html", "faults").read_text())
    for who in ("<td>east</td>", "<td>south</td>", *(reason for _, reason in liar.lies)):
        assert who in page, who
    local.wait_until_online(flower_deployment, HANGS)


@pytest.mark.faults
def test_a_run_begins_with_all_sites_and_is_resumed_by_a_quorum_which_the_third_joins(
    flower_deployment: Deployment,
) -> None:
    quorum = {"name": "quorum", "rounds": 500, "quorum": 0.5}
    config = settings(run=quorum, deploy={"timeout": 60.0, "validate_every": 0})
    folder = flower_deployment.runs / "quorum"

    def last() -> list[int]:
        records = read_history(folder)
        return records[-1]["clients"] if records else []

    leave(flower_deployment, "south")
    with pytest.raises(FedtailError, match=r"2 of 3 sites are online .*missing: south"):
        runs.wait(flower_deployment, start(flower_deployment, config))
    bring_back(flower_deployment, "south")
    local.wait_until_online(flower_deployment, HANGS)
    start(flower_deployment, config)
    until(last, "round 0")
    assert runs.stop(flower_deployment)
    leave(flower_deployment, "south")
    start(flower_deployment, config, resume=True)
    until(lambda: last() == [0, 1], "a round without south")
    assert {f["reason"] for f in read_history(folder)[-1]["refused"]} == {"the site is offline"}
    bring_back(flower_deployment, "south")
    until(lambda: last() == [0, 1, 2], "a round with south")
    assert {f["client"] for f in runs.where(flower_deployment)["errors"]} == {2}
    assert runs.stop(flower_deployment)
    local.wait_until_online(flower_deployment, HANGS)


def supernode(deployment: Deployment, tmp_path: Path, *options: str, drop: str = "") -> subprocess.Popen[bytes]:
    """A SuperNode at the folder in ``tmp_path`` that gives up at once when refused."""
    address = f"{deployment.host}:{deployment.port}"
    command = supernode_command(tmp_path, address, free_port())
    if drop:
        at = command.index(drop)
        del command[at : at + 2]
    with (tmp_path / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--max-retries", "1", *options],
            stdout=log, stderr=log, start_new_session=True,
            env={**flower_environment(tmp_path / "flwr"), SITE: str(tmp_path)},
        )  # fmt: skip


def test_strangers_are_refused(flower_deployment: Deployment, tmp_path: Path) -> None:
    """No key, an unregistered key, another CA, no TLS, a second site with a key in use."""
    cases: dict[str, tuple[tuple[str, ...], str]] = {
        "no key": ((), "--auth-supernode-private-key"),
        "unregistered key": ((), ""),
        "wrong CA": ((), ""),
        "plaintext": (("--insecure",), "--root-certificates"),
        "key in use": ((), ""),
    }
    started = {}
    for name, (options, drop) in cases.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        shutil.copy(flower_deployment.server / "ca.crt", folder)
        make_site_key(folder, "stranger")
        if name == "wrong CA":
            (folder / "ca.crt").unlink()
            make_ca(folder, "another")
        if name in ("wrong CA", "key in use"):
            shutil.copy(flower_deployment.site("north") / "site.key", folder / "site.key")
        started[name] = (folder, supernode(flower_deployment, folder, *options, drop=drop))
    try:
        for name, (folder, process) in started.items():
            try:
                code = process.wait(90)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name}: was not refused: {(folder / 'log').read_text()[-500:]}")
            assert code != 0, f"{name}: {(folder / 'log').read_text()[-500:]}"
    finally:
        for _, process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    with Control(flower_deployment) as control:
        assert set(control.nodes()) == set(flower_deployment.sites)
        assert len(control._known()) == len(flower_deployment.sites), "nobody else was let in"


def test_the_proxy_passes_on_the_fleet_path_only(flower_deployment: Deployment) -> None:
    if find_nginx() is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light); what the proxy refuses is not tested")
    context = ssl.create_default_context(cafile=str(flower_deployment.server / "ca.crt"))

    def ask(port: int, path: str, method: str = "POST") -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        connection.request(method, path, body=b"", headers={"content-type": "application/protobuf"})
        status = connection.getresponse().status
        connection.close()
        return status

    proxy, superlink = flower_deployment.proxy_port, flower_deployment.port
    refused = [
        "/v1/control/list-nodes", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/push-messages",
        "/docs", "/openapi.json", "/health", "/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes",
        "//v1/control/list-nodes",
    ]  # fmt: skip
    assert ask(superlink, "/v1/control/list-nodes") == 200, "the control API itself asks for no key"
    for path in refused:
        assert ask(proxy, path) in (400, 403, 404), path
    assert ask(proxy, "/v1/fleet/pull-messages", "GET") == 403
    assert ask(proxy, "/v1/fleet/pull-messages") == ask(superlink, "/v1/fleet/pull-messages"), "passed on"


def test_a_second_federation_on_the_same_port_is_refused(flower_deployment: Deployment) -> None:
    with pytest.raises(FedtailError, match="is running"):
        local.up(flower_deployment)


@pytest.mark.faults
def test_a_site_leaves_while_a_run_goes_on_and_a_key_that_was_replaced_opens_nothing(tmp_path: Path) -> None:
    names = ("north", "east", "south")
    deployment = create_deployment(tmp_path / "fed", names, settings(), port=free_port())
    config = settings(run={"name": "elastic", "rounds": 14, "quorum": 0.3, "checkpoint_every": 100})
    folder = deployment.runs / "elastic"
    try:
        local.up(deployment)
        run_id = start(deployment, config)
        until(lambda: len(read_history(folder)) >= 1, "round 0")
        rest = membership.remove_site(deployment, "east")
        processes.stop(rest.folder, "site:east")
        until(lambda: read_history(folder)[-1]["clients"] == [0, 2], "a round without east")
        done = runs.wait(rest, run_id)
        records = read_history(folder)
        assert [r["round"] for r in records] == list(range(14)) and done["state"] == "finished"
        assert records[0]["clients"] == [0, 1, 2] and records[-1]["clients"] == [0, 2]
        make_site_key(tmp_path, "north")
        membership.add_site(rest, "north", tmp_path / "site.pub")
        with Control(rest) as control:
            assert control.nodes()["north"] != "online", "the old key opens nothing"
            assert sum(n.status == "online" for n in control._known()) == 1
    finally:
        local.down(deployment)


def of_site(deployment: Deployment, site: str, workers: bool = False) -> list[int]:
    found = processes.find(deployment.folder, f"site:{site}")
    return [p.pid for p in found if not workers or " ".join(WORKER) in p.command]


@contextmanager
def signalled(pids: list[int], begin: int, end: int) -> Iterator[None]:
    for pid in pids:
        processes.send_signal(pid, begin)
    try:
        yield
    finally:
        for pid in pids:
            processes.send_signal(pid, end)


def kill_server(deployment: Deployment) -> None:
    while left := processes.find(deployment.folder, "superlink"):
        for process in left:
            processes.send_signal(process.pid, signal.SIGKILL)
        time.sleep(0.1)


def assert_every_sites_model(deployment: Deployment, folder: Path, config: Settings, tmp_path: Path) -> None:
    """Each site ends with the server's model, bit by bit; it is the simulator's under the seed that the sites drew,
    within the fixed point of sums: what the same run gives when nothing happens."""
    ours, name = load_file(folder / "model.safetensors"), json.loads((folder / "agreement.json").read_text())
    for site in deployment.sites:
        found = load_file(deployment.site(site) / "agreements" / name["agreement"][:24] / "run" / "model.safetensors")
        assert all(torch.equal(ours[each], found[each]) for each in ours), site
    same = {"run.seed": name["seed"], "data.seed": config.data_seed}
    here = run(changed(config, {**same, "run.folder": str(tmp_path), "engine.path": "reference"})).folder
    assert here is not None
    theirs = load_file(here / "model.safetensors")
    assert all(torch.allclose(ours[each], theirs[each], atol=1e-5) for each in ours)


@pytest.mark.faults
@pytest.mark.parametrize("trust", ["server", "blind"])
def test_a_run_through_frozen_sites_a_dead_worker_a_full_disk_and_a_server_killed_while_a_site_answers_loses_nothing(
    flower_deployment: Deployment, tmp_path: Path, trust: str
) -> None:
    """All sites must answer, and in the end the model is the simulator's: bit by bit, or within the fixed point of
    masked sums. A site keeps nothing of a run that trusts its server, so its full disk is no matter; another waits."""
    through = {"name": f"through-{trust}", "rounds": 8}
    config = settings(run=through, deploy={"timeout": 90.0, "trust": trust})
    folder = flower_deployment.runs / f"through-{trust}"

    def failed() -> bool:  # this run, and not the one that it resumes
        return runs.read_status(flower_deployment, run_id).get("state") == "failed"

    def reach(done: int) -> None:
        until(lambda: len(read_history(folder)) >= done or failed(), f"round {done}")
        assert not failed(), state()

    def state() -> dict[str, Any]:
        return runs.where(flower_deployment) or {"state": "none"}

    run_id = start(flower_deployment, config)
    reach(1)
    with signalled(of_site(flower_deployment, "east"), signal.SIGSTOP, signal.SIGCONT):
        time.sleep(8)
    frozen = [p.pid for p in processes.find(flower_deployment.folder, "superlink")]
    with signalled(frozen, signal.SIGSTOP, signal.SIGCONT):
        time.sleep(8)
    (worker,) = of_site(flower_deployment, "north", True)
    processes.send_signal(worker, signal.SIGKILL)
    reach(3)

    (worker,) = of_site(flower_deployment, "south", True)
    unlimited = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (0, unlimited[1]))
    if trust == "server":
        reach(4)
    else:
        until(lambda: "south: its disk is full" in state().get("waiting", ""), "status to name the site and the reason")
    assert of_site(flower_deployment, "south", True) == [worker], "a full disk ends no worker"
    resource.prlimit(worker, resource.RLIMIT_FSIZE, unlimited)

    reach(len(read_history(folder)) + 1)
    assert not state().get("waiting")
    with signalled(of_site(flower_deployment, "east", True), signal.SIGSTOP, signal.SIGCONT):
        log = flower_deployment.site("east") / "site.log"
        until(
            lambda: re.findall("a message of run|answered after", log.read_text())[-1:] == ["a message of run"], "one"
        )
        time.sleep(1)
        kill_server(flower_deployment)
        until(lambda: state()["state"] == "stopped", "status to say so")
    local.start_superlink(flower_deployment)
    wait_until_healthy(flower_deployment, HANGS, flower_deployment.server / "superlink.log")
    local.wait_until_online(flower_deployment, HANGS)
    runs.wait(flower_deployment, start(flower_deployment, config, resume=True))
    assert [r["round"] for r in read_history(folder)] == list(range(8))
    if trust == "server":
        assert_simulators_model(folder, settings(run=through), tmp_path)
    else:
        assert_every_sites_model(flower_deployment, folder, config, tmp_path)


@pytest.mark.faults
def test_a_blind_run_waits_for_a_site_whose_network_is_cut_and_goes_on_where_it_was(
    flower_deployment: Deployment, tmp_path: Path
) -> None:
    """Its connections are closed and no other is taken for twelve seconds, which ends Flower's client."""
    config = settings(run={"name": "cut", "rounds": 6}, deploy={"timeout": 30.0, "trust": "blind"})
    folder, gate = flower_deployment.runs / "cut", Gate(flower_deployment.port)
    leave(flower_deployment, "east")
    local.start_site(flower_deployment, "east", gate.address)
    local.wait_until_online(flower_deployment, HANGS)
    run_id = start(flower_deployment, config)
    until(lambda: len(read_history(folder)) >= 1, "round 0")
    gate.shut()
    until(lambda: "east: " in runs.where(flower_deployment).get("waiting", ""), "status to say who is waited for")
    gate.open = True
    done = runs.wait(flower_deployment, run_id)
    assert not done["waiting"] and [r["round"] for r in read_history(folder)] == list(range(6))
    assert_every_sites_model(flower_deployment, folder, config, tmp_path)
    processes.stop(flower_deployment.folder, "site:east")
    bring_back(flower_deployment, "east")
    local.wait_until_online(flower_deployment, HANGS)


@pytest.mark.faults
def test_a_run_whose_server_need_not_be_trusted_waits_for_a_killed_site_and_survives_its_server(
    flower_deployment: Deployment, tmp_path: Path
) -> None:
    """A sum needs all sites, so the run stands still until ``east`` is back; then the server is killed while ``south``
    answers. Nothing is lost: all rounds are there, and every site ends with the server's model, bit by bit."""
    config = settings(run={"name": "blind", "rounds": 5}, deploy={"timeout": 30.0, "trust": "blind"})
    folder = flower_deployment.runs / "blind"
    start(flower_deployment, config)
    until(lambda: len(read_history(folder)) >= 1 or runs.where(flower_deployment).get("state") == "failed", "round 0")
    for pid in of_site(flower_deployment, "east"):
        processes.send_signal(pid, signal.SIGKILL)
    bring_back(flower_deployment, "east")
    before = len(read_history(folder))
    until(lambda: len(read_history(folder)) > before + 1, "the run to go on with east")
    with signalled(of_site(flower_deployment, "south", True), signal.SIGSTOP, signal.SIGCONT):
        until((flower_deployment.site("south") / "waiting").exists, "a message at south")
        kill_server(flower_deployment)
    local.start_superlink(flower_deployment)
    wait_until_healthy(flower_deployment, HANGS, flower_deployment.server / "superlink.log")
    local.wait_until_online(flower_deployment, HANGS)
    runs.wait(flower_deployment, start(flower_deployment, config, resume=True))
    assert [r["round"] for r in read_history(folder)] == list(range(5))
    assert_every_sites_model(flower_deployment, folder, config, tmp_path)


def test_a_model_is_evaluated_and_monitored_over_its_sites_without_training(flower_deployment: Deployment) -> None:
    """Under ``blind``, by the commands: the figures are those of the run's own test on the same rows."""
    config = settings(run={"name": "life", "rounds": 2}, deploy={"timeout": 60.0, "trust": "blind"})
    folder = Path(runs.wait(flower_deployment, start(flower_deployment, config))["folder"])

    def call(*words: str) -> tuple[int, list[str]]:
        done = CliRunner().invoke(
            app, ["deploy", words[0], str(flower_deployment.folder), "--run", str(folder), *words[1:]]
        )
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output.strip().splitlines()

    code, lines = call("evaluate", "--json")
    found, trained = json.loads(lines[-1]), json.loads((folder / "result.json").read_text())
    assert code == 0 and found["metrics"]["accuracy"]["value"] == trained["test"]["accuracy"]
    code, lines = call("monitor", "--reference")
    assert code == 0 and lines[-1].startswith(f"monitoring begins with {found['rows']:,} reference rows")
    code, lines = call("monitor", "--name", "next", "--json")
    assert code == 0 and json.loads(lines[-1])["rows"] == found["rows"] and json.loads(lines[-1])["changed"] == []
