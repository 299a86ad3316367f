"""Flower's SuperNode, whose messages are answered by the site's worker: no app that a server sends is fetched or run.

By itself it would start the app of whoever reaches the control path of the server, in a new process for every message.
And in flwr 1.41 an error that is not retried (a TLS handshake that is cut off, a certificate that has expired) ends the
loop that asks for work, but a thread keeps the process alive, and nobody notices; here the process ends with it. Run as
a script, by its path, with the arguments of ``flower-supernode``: it imports nothing but the standard library, Flower
and what is light.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from functools import partial
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

from flwr.app import Error, Message

from fedtail.federate.flower import CONTACT, SITE, TESTED, WAITING, private
from fedtail.federate.flower.content import from_content, to_content
from fedtail.federate.site import worker_client

LOOP, OBJECTS = "flwr.supernode.start_client_internal", "flwr.supercore.inflatable.inflatable_utils"
GIVEN = {
    "_pull_and_store_message": {"receive", "pull_object", "confirm_message_received"},
    "_push_messages": {"send", "push_object"},
}
"""What the two halves of Flower's loop get, of what is needed here."""
USED = ("time", "get_object_tree", "get_all_nested_objects", "no_object_id_recompute", "RunNotRunningException")
APP_RAISED = 2
SOON, LATER, GROWTH = 0.3, 3.0, 1.1
"""Seconds between questions for work: right after a message, when there has been none for half a minute, and the factor
from one question to the next."""


class Contact(logging.Handler):
    """httpx logs every answer; a heartbeat is due some three times a minute, also while the site trains."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(r'/v1/fleet/\S+ "\S+ 200', record.getMessage()):
            touch(self.file)


class Desk:
    """Both halves of the SuperNode's loop, and its pauses: take a message and have it answered, send the answer."""

    def __init__(self, loop: Any, objects: Any, folder: Path) -> None:
        self.loop, self.objects = loop, objects
        self.site, self.waiting = folder / "site.toml", folder / WAITING
        self.pause, self.began = SOON, 0.0
        self.reply: Any = None

    def sleep(self, seconds: float) -> None:
        """Wait for work, for which Flower waits 3 s."""
        time.sleep(self.pause)
        self.pause = min(self.pause * GROWTH, LATER)

    def take(self, *, receive: Any, pull_object: Any, confirm_message_received: Any, **_: Any) -> int | None:
        """Return the run of a message that has been answered; None if there is none."""
        try:
            received = receive()
        except self.loop.RunNotRunningException:
            return None
        if received is None:
            return None
        told, tree = received
        run: int = told.metadata.run_id
        self.pause, self.began = SOON, time.monotonic()
        touch(self.waiting)

        def confirm(message: str) -> None:
            with contextlib.suppress(Exception):  # a server that goes meanwhile gets the answer when it is back
                confirm_message_received(run, message)

        pulled = self.objects.pull_and_inflate_object_from_tree
        try:
            message = pulled(tree, partial(pull_object, run), confirm, return_type=Message)
            message.metadata.__dict__["_message_id"] = tree.object_id
            self.reply = answered(message, self.site)
        except Exception as error:
            return self.lost("a message could not be taken", error)
        return run

    def give(self, *, send: Any, push_object: Any, **_: Any) -> None:
        """Send the answer."""
        reply, run = self.reply, self.reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        try:
            with self.loop.no_object_id_recompute():
                wanted, session = send(reply, self.loop.get_object_tree(reply), time.monotonic() - self.began)
                parts, push = self.loop.get_all_nested_objects(reply), partial(push_object, run, session)
                self.objects.push_objects(parts, push, object_ids_to_push=wanted)
            forget(self.waiting)
        except Exception as error:
            self.lost("an answer could not be sent", error)

    def lost(self, what: str, error: Exception) -> None:
        """Say so and go on: the server asks again for what it needs."""
        sys.stderr.write(f"ERROR :     {what}: {type(error).__name__}: {error}\n")
        forget(self.waiting)


def answered(message: Any, site: Path) -> Any:
    """The worker's answer to a message, or the error that Flower makes of an app that raises."""
    try:
        return Message(to_content(worker_client.ask(site, from_content(message.content))), reply_to=message)
    except Exception as error:
        sys.stderr.write(f"ERROR :     {error}\n")
        return Message(Error(APP_RAISED, f"{type(error)}:<'{error}'>"), reply_to=message)


def touch(file: Path) -> None:
    """Leave a sign; a full disk is no reason to end."""
    with contextlib.suppress(OSError):
        file.touch()


def forget(file: Path) -> None:
    """Take it away."""
    with contextlib.suppress(OSError):
        file.unlink()


def seat(folder: Path) -> bool:
    """Have the loop work as above. False, and a line, in a version of Flower that has other names: such a SuperNode
    must not start."""
    loses = f"it would run apps that a server sends; install flwr=={TESTED}"
    loop = private(LOOP, *USED, *GIVEN, loses=loses)
    objects = private(OBJECTS, "pull_and_inflate_object_from_tree", "push_objects", loses=loses)
    if loop is None or objects is None:
        return False
    if missing := [name for name, given in GIVEN.items() if given - set(signature(getattr(loop, name)).parameters)]:
        sys.stderr.write(f"ERROR :     {LOOP}.{missing[0]} is not as it was: {loses}\n")
        return False
    desk = Desk(loop, objects, folder)
    loop.time, loop._pull_and_store_message, loop._push_messages = desk, desk.take, desk.give
    return True


def main() -> int:
    """Run the SuperNode; returns when it has ended, whatever threads it leaves."""
    if not os.environ.get(SITE):
        sys.stderr.write(f"ERROR :     {SITE} does not say which site this is; use `fedtail site run`\n")
        return 2
    folder = Path(os.environ[SITE])
    (program,) = entry_points(group="console_scripts", name="flower-supernode")
    start = program.load()
    forget(folder / WAITING)
    if not seat(folder):
        return 2
    answers = logging.getLogger("httpx")
    answers.setLevel(logging.INFO)
    answers.propagate = False
    answers.addHandler(Contact(folder / CONTACT))
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
