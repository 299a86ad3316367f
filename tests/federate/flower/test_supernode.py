"""The SuperNode's loop asks for work often while there is some, answers every message, and runs pinned apps only."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supernode import start_client_internal as loop

from fedtail.federate.flower import TESTED, guard, superexec, supernode


@pytest.fixture
def untouched() -> Iterator[None]:
    """Flower's loop as it was, afterwards."""
    names = ("time", "subprocess", "_pull_and_store_message", "_push_messages", "_verify_fab")
    before = {name: getattr(loop, name) for name in names}
    yield
    for name, value in before.items():
        setattr(loop, name, value)


def test_pauses_grow_without_work_and_are_short_after_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    clock = supernode.Impatient()
    for _ in range(60):
        clock.sleep(3)
    assert slept[0] == supernode.SOON and slept[-1] == supernode.LATER and sum(slept[:25]) < 35
    clock.sleep(0.5)
    clock.sleep(3)
    assert slept[-2:] == [0.1, supernode.SOON]
    assert clock.monotonic() > 0, "all else is the module's own"


def test_the_superexec_it_starts_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(supernode.subprocess, "Popen", lambda command, **options: started.append(command))
    supernode.Programs().Popen(["flower-superexec", "--insecure"])
    supernode.Programs().Popen(["other"])
    assert started[0][0] == sys.executable and started[0][2].endswith("superexec.py") and started[0][3] == "--insecure"
    assert started[1] == ["other"]


def test_the_version_we_pin_has_all_that_is_replaced(capfd: pytest.CaptureFixture[str], untouched: None) -> None:
    assert version("flwr") == TESTED, "look at the loop again, then raise TESTED"
    supernode.hurry()
    supernode.keep_up()
    assert guard.pin_apps(["0" * 64])
    for module in ("flwr.supernode.main", "flwr.superlink.main"):
        assert guard.private(module, "create_app", loses="") is not None
    assert guard.private(superexec.EXECUTOR, "subprocess.Popen", "subprocess.DEVNULL", loses="") is subprocess_executor
    assert capfd.readouterr().err == ""


def test_another_version_is_run_as_it_is_with_a_line_for_what_is_lost(
    capfd: pytest.CaptureFixture[str], untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("time", "_push_messages"):
        monkeypatch.delattr(loop, name)
    whole = loop._pull_and_store_message
    supernode.hurry()
    supernode.keep_up()
    first, second = capfd.readouterr().err.splitlines()
    assert "has no attribute 'time'" in first and "rounds take several times as long" in first
    assert "_push_messages" in second and "a message late" in second and loop._pull_and_store_message is whole


def test_a_version_whose_apps_cannot_be_pinned_starts_only_where_the_site_says_so(
    capfd: pytest.CaptureFixture[str], untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(loop, "_verify_fab")
    assert not guard.pin_apps(["0" * 64])
    assert "apps cannot be pinned" in capfd.readouterr().err
    assert guard.pin_apps(["0" * 64, "any"])


def packed(size: int, files: int = 1) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(files):
            archive.writestr(f"app/{k}.py", bytes(size))
    return out.getvalue()


@pytest.mark.parametrize("content", [packed(30_000_000), packed(1, 2000)])
def test_an_app_that_would_fill_the_memory_is_refused_before_any_of_it_is_unpacked(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> bytes:
        raise AssertionError("unpacked")

    monkeypatch.setattr(zipfile.ZipFile, "read", read)
    with pytest.raises(ValueError, match="an app of"):
        guard.app_hash(content)


def test_an_app_runs_if_it_is_pinned_and_only_then(capfd: pytest.CaptureFixture[str], untouched: None) -> None:
    ours, other = packed(10), packed(11)
    assert guard.pin_apps([guard.app_hash(ours)])
    verified = [loop._verify_fab(SimpleNamespace(content=each), {}) for each in (ours, other, b"no zip")]  # type: ignore[arg-type]
    assert verified == [True, False, False]
    assert f"not pinned here: {guard.app_hash(other)}" in capfd.readouterr().err


class State:
    """A SuperNode's state: messages to take, answers that apps have put there."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.msg_store: dict[str, SimpleNamespace] = {}
        self.sent: list[str] = []

    def answer(self, message: str) -> None:
        metadata = SimpleNamespace(reply_to_message_id=message)
        self.msg_store[message] = SimpleNamespace(message=SimpleNamespace(metadata=metadata), is_retrieved=False)


def test_an_answer_left_over_from_a_server_that_went_does_not_delay_those_that_follow(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server goes while the site takes message A: Flower gives it up, but the app has it, and answers. From then on
    one answer waits where Flower sends one for every message that it takes."""
    state = State()

    def pull(state: State) -> int | None:
        if not state.messages:
            return None
        message = state.messages.pop(0)
        if message != "B":
            state.answer(message)
        return 1 if message != "A" else None  # A's confirmation failed

    def push(state: State) -> None:
        for message, entry in state.msg_store.items():
            if not entry.is_retrieved:
                entry.is_retrieved = True
                state.sent.append(f"answer to {message}")

    monkeypatch.setattr(loop, "_pull_and_store_message", pull)
    monkeypatch.setattr(loop, "_push_messages", push)
    waiting = tmp_path / "waiting"
    monkeypatch.setenv(supernode.WAITING, str(waiting))
    supernode.keep_up()

    def turn() -> None:
        taken = state.messages == ["B"]
        if loop._pull_and_store_message(state=state) is not None:  # type: ignore[call-arg]
            assert waiting.exists() == taken
            loop._push_messages(state=state)  # type: ignore[call-arg]
            assert not waiting.exists()

    state.messages = ["A"]
    turn()
    assert state.sent == ["answer to A"]
    state.messages = ["B"]  # its answer takes longer
    turn()
    state.answer("B")
    turn()
    assert state.sent == ["answer to A", "answer to B"], "and not only once C has come"


def test_what_flower_keeps_of_answers_is_what_the_loop_looks_at() -> None:
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState, MessageEntry

    assert "is_retrieved" in MessageEntry.__annotations__
    assert "self.msg_store" in inspect.getsource(InMemoryNodeState)


def test_answers_of_the_server_leave_a_sign_and_a_full_disk_is_borne(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, file = supernode.Contact(), tmp_path / "contact"
    monkeypatch.setenv(supernode.CONTACT, str(file))
    for line in ('HTTP Request: POST https://x/v1/fleet/pull "HTTP/1.1 401 Unauthorized"', "other"):
        handler.emit(logging.LogRecord("httpx", logging.INFO, "", 0, line, None, None))
    assert not file.exists()
    line = 'HTTP Request: POST https://x/v1/fleet/pull "HTTP/1.1 200 OK"'
    handler.emit(logging.LogRecord("httpx", logging.INFO, "", 0, line, None, None))
    assert file.exists()
    monkeypatch.setenv(supernode.CONTACT, str(tmp_path / "no folder" / "contact"))
    supernode.touch(supernode.CONTACT)
    supernode.touch("FEDTAIL_NO_SUCH_VARIABLE")
    assert list(tmp_path.iterdir()) == [file]
