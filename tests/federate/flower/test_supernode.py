"""The SuperNode's loop asks for work often while there is some, and has the worker answer every message: no app."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as loop

from fedtail.federate.flower import CONTACT, SITE, TESTED, private, supernode
from fedtail.federate.flower.content import from_content, to_content
from fedtail.federate.flower.transport import describe
from fedtail.federate.site import worker_client
from tests.federate.conftest import full_disk

PARTS = {"meta": b"{}", "tensor/x": bytes(1 << 19)}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flower's loop as it was, afterwards; meanwhile messages can be made."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 3)
    names = ("time", "_pull_and_store_message", "_push_messages")
    before = {name: getattr(loop, name) for name in names}
    yield
    for name, value in before.items():
        setattr(loop, name, value)


class Server:
    """What Flower's loop hands to its two halves, for one message: the server's side of it."""

    def __init__(self, parts: dict[str, bytes]) -> None:
        message = Message(to_content(parts), 7, "query.fedtail")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.told: list[Any] = [(message, get_object_tree(message))]
        self.objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
        self.got: dict[str, bytes] = {}
        self.sent: list[Any] = []
        self.gone = self.deaf = False

    def receive(self) -> Any:
        return self.told.pop() if self.told else None

    def pull_object(self, run: int, name: str) -> bytes:
        return self.objects[name]

    def confirm_message_received(self, run: int, name: str) -> None:
        if self.gone:
            raise ConnectionError("the server is gone")

    def send(self, reply: Any, tree: Any, seconds: float) -> tuple[set[str], str]:
        if self.deaf:
            raise ConnectionError("the server is gone")
        self.sent.append(reply)
        return {tree.object_id, *(child.object_id for child in tree.children)}, "session"

    def push_object(self, run: int, session: str, name: str, content: bytes) -> None:
        self.got[name] = content


def turn(server: Server) -> int | None:
    """The loop's, as Flower calls its two halves."""
    run = loop._pull_and_store_message(
        state=None, object_store=None, node_config={}, receive=server.receive, get_run=None, get_fab=None,
        pull_object=server.pull_object, confirm_message_received=server.confirm_message_received, trusted_entities=None,
    )  # type: ignore[arg-type] # fmt: skip
    if run is not None:
        loop._push_messages(state=None, object_store=None, send=server.send, push_object=server.push_object)  # type: ignore[arg-type]
    return run


def test_a_message_goes_to_the_worker_and_its_answer_back(
    untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(site: Path, parts: dict[str, bytes]) -> dict[str, bytes]:
        asked.append((site, parts))
        return {"meta": b"[1]"}

    monkeypatch.setattr(worker_client, "ask", ask)
    assert supernode.seat(tmp_path / "site.toml")
    server = Server(PARTS)
    question = server.told[0][0].metadata.message_id
    assert turn(server) == 3 and turn(server) is None and asked == [(tmp_path / "site.toml", PARTS)]
    (reply,) = server.sent
    assert from_content(reply.content) == {"meta": b"[1]"} and reply.metadata.reply_to_message_id == question
    assert reply.object_id in server.got


def test_a_server_that_goes_while_a_message_is_taken_gets_its_answer_when_it_is_back(
    untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "ask", lambda site, parts: {"meta": b"{}"})
    assert supernode.seat(tmp_path / "site.toml")
    server = Server(PARTS)
    server.gone = True
    assert turn(server) == 3 and len(server.sent) == 1


def test_what_cannot_be_taken_answered_or_sent_ends_no_loop(
    untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ask(site: Path, parts: dict[str, bytes]) -> dict[str, bytes]:
        raise worker_client.WorkerError("the site's worker died twice")

    monkeypatch.setattr(worker_client, "ask", ask)
    assert supernode.seat(tmp_path / "site.toml")
    server = Server(PARTS)
    assert turn(server) == 3 and describe(2, server.sent[0].error.reason).startswith("the site's worker")
    foreign = Server(PARTS)
    foreign.told[0][0].content.config_records.clear()
    assert turn(foreign) == 3
    torn = Server(PARTS)
    torn.objects = dict.fromkeys(torn.objects, b"")
    assert turn(torn) is None and torn.sent == []
    deaf = Server(PARTS)
    deaf.deaf = True
    assert turn(deaf) == 3
    said = capfd.readouterr().err
    assert "died twice" in said and "could not be taken" in said and "its answer could not be sent" in said


def test_pauses_grow_without_work_and_are_short_after_a_message(
    untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(worker_client, "ask", lambda site, parts: {"meta": b"{}"})
    assert supernode.seat(tmp_path / "site.toml")
    for _ in range(60):
        loop.time.sleep(3)
    assert slept[0] == supernode.SOON and slept[-1] == supernode.LATER and sum(slept[:25]) < 35
    turn(Server(PARTS))
    loop.time.sleep(3)
    assert slept[-1] == supernode.SOON


def test_the_version_we_pin_has_all_that_is_used(
    capfd: pytest.CaptureFixture[str], untouched: None, tmp_path: Path
) -> None:
    assert version("flwr") == TESTED, "look at the loop again, then raise TESTED"
    assert supernode.seat(tmp_path / "site.toml")
    for module in ("flwr.supernode.main", "flwr.superlink.main"):
        assert private(module, "create_app", loses="") is not None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("where", ["pull_object", "confirm_message_received", "send"])
def test_a_run_that_ends_while_its_message_is_taken_or_answered_ends_no_loop(
    untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As after a server was killed and started again. Flower's exception for it is no Exception."""

    def over(*_: Any) -> None:
        raise loop.RunNotRunningException

    monkeypatch.setattr(worker_client, "ask", lambda site, parts: parts)
    assert supernode.seat(tmp_path / "site.toml") and not issubclass(loop.RunNotRunningException, Exception)
    server = Server(PARTS)
    monkeypatch.setattr(server, where, over)
    assert turn(server) == (3 if where == "send" else None) and not server.got
    server = Server(PARTS)
    assert turn(server) == 3 and server.got


@pytest.mark.parametrize("change", ["a name", "a parameter"])
def test_a_version_that_would_run_what_a_server_sends_does_not_start(
    capfd: pytest.CaptureFixture[str], untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "a name":
        monkeypatch.delattr(loop, "_push_messages")
    else:
        monkeypatch.setattr(loop, "_push_messages", lambda state, connection: None)
    whole = loop._pull_and_store_message
    assert not supernode.seat(tmp_path / "site.toml") and loop._pull_and_store_message is whole
    assert "_push_messages" in (said := capfd.readouterr().err) and "it would run apps that a server sends" in said
    monkeypatch.setenv(SITE, str(tmp_path))
    monkeypatch.setattr(supernode, "entry_points", lambda **_: [SimpleNamespace(load=lambda: pytest.fail)])
    assert supernode.main() == 2


def test_a_supernode_without_a_site_does_not_start() -> None:
    environment = {k: v for k, v in os.environ.items() if k != SITE}
    command = [sys.executable, "-P", supernode.__file__]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "does not say which site this is" in ended.stderr


def test_answers_of_the_server_leave_a_sign_and_a_full_disk_is_borne(tmp_path: Path) -> None:
    file = tmp_path / CONTACT
    handler = supernode.Contact(file)
    for line in ('HTTP Request: POST https://x/v1/fleet/pull "HTTP/1.1 401 Unauthorized"', "other"):
        handler.emit(logging.LogRecord("httpx", logging.INFO, "", 0, line, None, None))
    assert not file.exists()
    line = 'HTTP Request: POST https://x/v1/fleet/pull "HTTP/1.1 200 OK"'
    handler.emit(logging.LogRecord("httpx", logging.INFO, "", 0, line, None, None))
    assert file.exists()
    file.unlink()
    with full_disk():
        handler.emit(logging.LogRecord("httpx", logging.INFO, "", 0, line, None, None))
        supernode.say("nobody can read this")
    supernode.Contact(tmp_path / "no folder" / CONTACT).emit(
        logging.LogRecord("httpx", logging.INFO, "", 0, line, None, None)
    )
