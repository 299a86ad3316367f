"""The transport over Flower's grid, with a grid that misbehaves in ways a real one rarely shows."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.app import Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid

from fedtail.errors import FedtailError
from fedtail.federate.flower.content import to_content
from fedtail.federate.flower.transport import FlowerTransport, describe, fetching_at_most, wait_for_nodes


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can only be made inside a Flower task."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)


NODES = {0: 11, 1: 22, 2: 33}


class Grid:
    """Answers every message at the first poll with what ``answer`` makes of it, each as often as ``copies`` says."""

    def __init__(self, answer: Any = None, copies: int = 1, online: tuple[int, ...] = (11, 22, 33)) -> None:
        self.answer, self.copies, self.online = answer or (lambda message: to_content({"meta": b"yes"})), copies, online
        self.sent: dict[str, Message] = {}
        self.polls = 0

    def get_node_ids(self) -> list[int]:
        return list(self.online)

    def push_messages(self, messages: list[Message]) -> list[str]:
        (message,) = messages
        identity = f"message-{len(self.sent)}"
        message.metadata.__dict__["_message_id"] = identity
        self.sent[identity] = message
        return [identity]

    def pull_messages(self, identities: list[str]) -> list[Message]:
        self.polls += 1
        out = []
        for identity in identities:
            content = self.answer(self.sent[identity])
            if content is not None:
                out += [Message(content, reply_to=self.sent[identity])] * self.copies
        return out


def exchange(grid: Grid, timeout: float | None = 5.0) -> tuple[dict[int, Any], dict[int, str]]:
    payloads = {k: {"meta": f"to {k}".encode()} for k in NODES}
    return ask(FlowerTransport(grid, NODES, poll=0.01), payloads, timeout)


def ask(transport: FlowerTransport, payloads: dict[int, Any], timeout: float | None) -> tuple[Any, Any]:
    replies: dict[int, Any] = {}
    errors = transport.exchange("train", payloads, timeout, replies.__setitem__)
    return replies, errors


def test_duplicate_replies_are_ignored() -> None:
    grid = Grid(copies=3)
    replies, errors = exchange(grid)
    assert replies == {k: {"meta": b"yes"} for k in NODES} and errors == {}
    assert grid.polls == 1, "nothing is waited for twice"


def test_a_late_site_is_named_and_the_others_are_heard() -> None:
    grid = Grid(lambda message: None if message.metadata.dst_node_id == 22 else to_content({"meta": b"yes"}))
    replies, errors = exchange(grid, timeout=0.1)
    assert sorted(replies) == [0, 2] and errors == {1: "no reply within 0.1 s"}


@pytest.mark.parametrize(
    ("timeout", "reason"), [(0.05, "no reply within 0.05 s"), (60.0, "the message no longer exists")]
)
def test_a_message_that_flower_says_has_expired_had_no_reply_in_time(timeout: float, reason: str) -> None:
    def answer(message: Message) -> Error:
        time.sleep(0.06)
        return Error(3, "gone")

    errors = FlowerTransport(Grid(answer), NODES, poll=0).exchange("train", {0: {}}, timeout, lambda k, parts: None)
    assert errors == {0: reason}


def test_an_offline_site_is_not_waited_for() -> None:
    grid = Grid(online=(11, 33))
    replies, errors = exchange(grid)
    assert sorted(replies) == [0, 2] and errors == {1: "the site is offline"} and len(grid.sent) == 2


def test_errors_and_foreign_replies_belong_to_the_message_replied_to() -> None:
    raised = "<class 'fedtail_app.worker_client.WorkerError'>:<'there is no table 'x.csv''>"
    said = {11: Error(8, "killed\nby signal 9"), 22: RecordDict(), 33: Error(2, raised)}
    replies, errors = exchange(Grid(lambda message: said[message.metadata.dst_node_id]))
    assert replies == {}
    assert errors[0] == "the site's app crashed" and errors[1].startswith("malformed reply")
    assert errors[2] == "the site's worker could not answer; its worker.log says why", "and no word of the site's"


def test_sites_that_do_not_come_are_named() -> None:
    node = SimpleNamespace(public_key=b"a", node_id=11, name="")
    grid = SimpleNamespace(get_nodes=lambda: [node])
    assert wait_for_nodes(grid, {0: b"a"}, 1, 0.0) == {0: 11}
    with pytest.raises(FedtailError, match=r"1 of 2 sites are online .* missing: south"):
        wait_for_nodes(grid, {0: b"a", 1: b"b"}, 2, 0.0, 0.01, names=("north", "south"))


def test_flowers_words_are_left_out_where_ours_say_it_all() -> None:
    assert describe(5, "Error: Node Unavailable - the destination node failed to report") == "the site disconnected"
    assert describe(42, None) == "error 42"


def test_a_quorum_of_sites_is_enough_and_one_that_comes_later_is_found_by_its_key() -> None:
    nodes = [
        SimpleNamespace(public_key=b"a", node_id=11, name=""),
        SimpleNamespace(public_key=b"b", node_id=22, name=""),
    ]
    keys = {0: b"a", 1: b"b", 2: b"c"}
    grid = Grid(online=(11, 22))
    grid.get_nodes = lambda: nodes  # type: ignore[attr-defined]
    found = wait_for_nodes(grid, keys, 3, 0.0, 0.01, names=("north", "east", "south"), quorum=0.5)
    assert found == {0: 11, 1: 22}
    with pytest.raises(FedtailError, match=r"2 of 3 sites are online .*, 3 are needed; missing: south"):
        wait_for_nodes(grid, keys, 3, 0.0, 0.01, names=("north", "east", "south"), quorum=0.7)
    transport = FlowerTransport(grid, found, poll=0.01, keys=keys)
    _, errors = ask(transport, {k: {"meta": b""} for k in keys}, 5.0)
    assert errors == {2: "the site is offline"}
    nodes.append(SimpleNamespace(public_key=b"c", node_id=33, name=""))
    grid.online = (11, 22, 33)
    replies, errors = ask(transport, {k: {"meta": b""} for k in keys}, 5.0)
    assert sorted(replies) == [0, 1, 2] and errors == {}


def test_no_more_is_fetched_of_a_reply_than_it_can_have() -> None:
    """A site that sends pieces without end: Flower would put all of them into memory first."""
    fetched: list[str] = []

    def piece(object_id: str) -> bytes:
        fetched.append(object_id)
        return b"x" * 1000

    names = [f"{k}" for k in range(500)]
    with fetching_at_most(20_000), pytest.raises(ObjectPullError, match="is larger than 0 MB") as raised:
        http_grid.pull_objects(names, piece, max_concurrent_pulls=2)
    assert len(fetched) < 40
    assert describe(3, f"Reply message objects are unavailable. {raised.value}") == ("the reply is larger than 0 MB")
    with fetching_at_most(1_000_000):
        assert len(http_grid.pull_objects(names, piece)) == 500
