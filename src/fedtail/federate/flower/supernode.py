"""Flower's SuperNode as a process that ends when it is of no more use, leaves a sign of every answer it gets, and loses
no time between messages.

In flwr 1.41 an error that is not retried (a TLS handshake that is cut off, a certificate that has expired) ends the
loop that asks for work, but a thread keeps the process alive, and nobody notices. The loop asks every three seconds,
here more often while there is work, and starts a process per message from scratch (see ``superexec``). Run as a script,
by its path, with the arguments of ``flower-supernode``: it imports nothing but the standard library, Flower and what is
beside it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedtail.federate.flower.guard import APPS, pin_apps, private

CONTACT = "FEDTAIL_CONTACT"
"""Environment variable: the file that is touched whenever the server has answered."""
WAITING = "FEDTAIL_WAITING"
"""Environment variable: the file that is there from when a message is taken until its answer is sent."""
LOOP = "flwr.supernode.start_client_internal"
SOON, LATER, GROWTH = 0.3, 3.0, 1.1
"""Seconds between questions for work: right after a message, when there has been none for half a minute, and the factor
from one question to the next."""


class Contact(logging.Handler):
    """httpx logs every answer; a heartbeat is due some three times a minute, also while the site trains."""

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(r'/v1/fleet/\S+ "\S+ 200', record.getMessage()):
            touch(CONTACT)


class Impatient:
    """The module ``time`` for the SuperNode's loop: it waits 3 s for work, and 0.5 s for an answer."""

    pause = SOON

    def sleep(self, seconds: float) -> None:
        if seconds < LATER:  # a message is being answered
            self.pause = SOON
            time.sleep(min(seconds, 0.1))
            return
        time.sleep(self.pause)
        self.pause = min(self.pause * GROWTH, LATER)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Programs:
    """The module ``subprocess`` for the same loop: it starts the SuperExec, here ours."""

    def Popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if command[0] == "flower-superexec":
            command = [sys.executable, "-P", str(Path(__file__).with_name("superexec.py")), *command[1:]]
            options["env"] = {**os.environ, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # it asks this process only
        return subprocess.Popen(command, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def hurry() -> None:
    """Have the loop wait and start programs as above."""
    loop: Any = private(LOOP, "time", "subprocess", loses="rounds take several times as long")
    if loop is not None:
        loop.time, loop.subprocess = Impatient(), Programs()


def keep_up() -> None:
    """Have the loop send every answer as soon as there is no message.

    By itself it sends one per message that it takes. When the server goes while a message is taken, the message is
    answered all the same, and from then on every answer would wait until the next message has come.
    """
    names = ("_pull_and_store_message", "_push_messages")
    loop: Any = private(LOOP, *names, loses="an answer that could not be sent at once may come a message late")
    if loop is None:
        return
    pull, push = loop._pull_and_store_message, loop._push_messages

    @functools.wraps(pull)
    def pull_or_send(*, state: Any, **options: Any) -> int | None:
        run: int | None = pull(state=state, **options)
        if run is not None:
            touch(WAITING)
        held = getattr(state, "msg_store", {}).values()
        answered = any(entry.message.metadata.reply_to_message_id and not entry.is_retrieved for entry in held)
        return 0 if run is None and answered else run  # not None: the loop sends what is there

    @functools.wraps(push)
    def send(**options: Any) -> None:
        push(**options)
        forget(WAITING)

    loop._pull_and_store_message, loop._push_messages = pull_or_send, send


def touch(variable: str) -> None:
    """Leave a sign in the file that an environment variable names; a full disk is no reason to end."""
    with contextlib.suppress(OSError, KeyError):
        Path(os.environ[variable]).touch()


def forget(variable: str) -> None:
    """Take such a sign away."""
    with contextlib.suppress(OSError, KeyError):
        Path(os.environ[variable]).unlink()


def main() -> int:
    """Run the SuperNode; returns when it has ended, whatever threads it leaves."""
    if not os.environ.get(APPS):
        sys.stderr.write(f"ERROR :     {APPS} does not say which apps this site runs; use `fedtail site run`\n")
        return 2
    (program,) = entry_points(group="console_scripts", name="flower-supernode")
    start = program.load()
    forget(WAITING)
    hurry()
    keep_up()
    if not pin_apps(os.environ[APPS].split(",")):
        return 2
    answers = logging.getLogger("httpx")
    answers.setLevel(logging.INFO)
    answers.propagate = False
    answers.addHandler(Contact(logging.INFO))
    try:
        start()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
