"""Flower's SuperNode as a process that ends when it is of no more use, leaves a sign of every answer it gets, and loses
no time between messages.

In flwr 1.41 an error that is not retried (a TLS handshake that is cut off, a certificate that has expired) ends the
loop that asks for work, but a thread keeps the process alive, and nobody notices. The loop asks every three seconds,
here more often while there is work, and starts a process per message from scratch (see ``superexec``). Run as a script,
by its path, with the arguments of ``flower-supernode``: it imports nothing but the standard library, Flower and what is
beside it.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from fedtail.federate.flower import TESTED
from fedtail.federate.flower.guard import APPS, close_paths, pin_apps
from fedtail.federate.flower.middleware import lighten_supernode

CONTACT = "FEDTAIL_CONTACT"
"""Environment variable: the file that is touched whenever the server has answered."""


class Contact(logging.Handler):
    """httpx logs every answer; a heartbeat is due some three times a minute, also while the site trains."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(r'/v1/fleet/\S+ "\S+ 200', record.getMessage()):
            self.file.touch()


SOON, LATER, GROWTH = 0.3, 3.0, 1.1
"""Seconds between questions for work: right after a message, when there has been none for half a minute, and the factor
from one question to the next."""


class Impatient:
    """The module ``time`` for the SuperNode's loop: it waits 3 s for work, and 0.5 s for an answer."""

    def __init__(self) -> None:
        self.pause = SOON

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


def protect(apps: list[str]) -> None:
    """Run no other apps, and let no other user of this machine pull messages or push answers."""
    from flwr.supernode import main as web

    pin_apps(apps)
    close_paths(web, ())


def hurry() -> None:
    """Put both in the place of what the loop uses, if Flower is the version that is known."""
    if version("flwr") == TESTED:
        from flwr.supernode import start_client_internal as loop

        loop.time = Impatient()  # type: ignore[assignment]
        loop.subprocess = Programs()  # type: ignore[assignment]
        lighten_supernode()


def main() -> int:
    """Run the SuperNode; returns when it has ended, whatever threads it leaves."""
    if not os.environ.get(APPS):
        sys.stderr.write(f"ERROR :     {APPS} does not say which apps this site runs; use `fedtail site run`\n")
        return 2
    (program,) = entry_points(group="console_scripts", name="flower-supernode")
    start = program.load()
    hurry()
    protect(os.environ[APPS].split(","))
    if CONTACT in os.environ:
        answers = logging.getLogger("httpx")
        answers.setLevel(logging.INFO)
        answers.propagate = False
        answers.addHandler(Contact(Path(os.environ[CONTACT])))
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
