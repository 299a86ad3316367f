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

from fedtail.federate.flower import CONTACT, SITE, TESTED, private
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
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                self.file.touch()


class Desk:
    """Both halves of the SuperNode's loop, and its pauses: take a message and have it answered, send the answer."""

    def __init__(self, loop: Any, objects: Any, site: Path) -> None:
        self.loop, self.objects, self.site = loop, objects, site
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
        say(f"a message of run {run}")

        def confirm(message: str) -> None:
            with contextlib.suppress(Exception):  # a server that goes meanwhile gets the answer when it is back
                confirm_message_received(run, message)

        pulled = self.objects.pull_and_inflate_object_from_tree
        try:
            message = pulled(tree, partial(pull_object, run), confirm, return_type=Message)
            message.metadata.__dict__["_message_id"] = tree.object_id
            self.reply = answered(message, self.site)
        except self.loop.RunNotRunningException:  # which is no Exception
            say("its run is over")
            return None
        except Exception as error:  # the server asks again for what it needs
            say(f"it could not be taken: {type(error).__name__}: {error}")
            return None
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
            say(f"answered after {time.monotonic() - self.began:.1f} s")
        except self.loop.RunNotRunningException:
            say("its run is over, and nobody waits for the answer")
        except Exception as error:
            say(f"its answer could not be sent: {type(error).__name__}: {error}")


def answered(message: Any, site: Path) -> Any:
    """The worker's answer to a message, or an error that names its kind alone; its words stay in the log."""
    try:
        return Message(to_content(worker_client.ask(site, from_content(message.content))), reply_to=message)
    except Exception as error:
        say(f"its answer is an error: {error}")
        return Message(Error(APP_RAISED, str(type(error))), reply_to=message)


def say(line: str) -> None:
    """Write a line into the service's log; a full disk is no reason to end."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def seat(site: Path) -> bool:
    """Have the loop work as above. False, and a line, in a version of Flower that has other names: such a SuperNode
    must not start."""
    loses = f"it would run apps that a server sends; install flwr=={TESTED}"
    loop = private(LOOP, *USED, *GIVEN, loses=loses)
    objects = private(OBJECTS, "pull_and_inflate_object_from_tree", "push_objects", loses=loses)
    if loop is None or objects is None:
        return False
    if missing := [name for name, given in GIVEN.items() if given - set(signature(getattr(loop, name)).parameters)]:
        say(f"{LOOP}.{missing[0]} is not as it was: {loses}")
        return False
    desk = Desk(loop, objects, site)
    loop.time, loop._pull_and_store_message, loop._push_messages = desk, desk.take, desk.give
    return True


def main() -> int:
    """Run the SuperNode; returns when it has ended, whatever threads it leaves."""
    if not os.environ.get(SITE):
        say(f"{SITE} does not say which site this is; use `fedtail site run`")
        return 2
    folder = Path(os.environ[SITE])
    (program,) = entry_points(group="console_scripts", name="flower-supernode")
    start = program.load()
    if not seat(folder / "site.toml"):
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
