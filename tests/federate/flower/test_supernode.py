"""The SuperNode's loop asks for work often while there is some, and seldom when there is none."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (pip install 'fedtail[flower]')")

from fedtail.federate.flower import TESTED, supernode


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


def test_the_loop_of_the_version_we_pin_has_what_is_replaced() -> None:
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supernode import start_client_internal as loop

    assert version("flwr") == TESTED, "look at the loop again, then raise TESTED"
    assert loop.time and loop.subprocess and subprocess_executor.subprocess
