"""The transport over Flower's grid: push one message per client, poll for the replies.

The loop is ours because Flower's own waits three seconds between polls and insists on one record per reply.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message

from fedtail.errors import FedtailError
from fedtail.federate.flower import private
from fedtail.federate.flower.content import ACTION, from_content, to_content
from fedtail.federate.protocol.faults import clean, log
from fedtail.federate.protocol.transport import Errors, Take, with_phase
from fedtail.federate.protocol.wire import Parts, size_of
from fedtail.rounds.acceptance import least

POLL_SECONDS = 0.25
PULLED_BYTES, PULLED_MESSAGES = 1 << 26, 16
"""Replies are fetched in groups of about so many bytes (taking a reply to be as large as its question), and at most so
many at a time: Flower puts a whole group into memory."""
REPLY_TIMES, REPLY_BYTES = 16, 1 << 26
"""The most that is fetched of a reply: so many times its question, and so many bytes more. What it may have exactly,
the engine knows and checks."""
TOO_LARGE = "the reply is larger than"
EXPIRED = 3
ERRORS = {
    1: "the site's app cannot be loaded",
    2: "the site's app raised",
    EXPIRED: "the message no longer exists",
    4: "the reply is missing",
    5: "the site disconnected",
    7: "the site refused the app bundle",
    8: "the site's app crashed",
}
GRID: Any = private(
    "flwr.superlink.grid.http_grid", "pull_objects", "ObjectPullError", loses="replies may be of any size"
)
SELF_EXPLAINING = (EXPIRED, 4, 5)
"""Where Flower's own text only says the same at length."""


class FlowerTransport:
    """Client k is the Flower node ``nodes[k]``; where ``keys`` are given, the one that authenticates with ``keys[k]``,
    whenever it comes online."""

    name = "flower"

    def __init__(
        self, grid: Any, nodes: Mapping[int, int], poll: float = POLL_SECONDS, keys: Mapping[int, bytes] | None = None
    ) -> None:
        self.grid, self.nodes, self.poll, self.keys = grid, dict(nodes), poll, dict(keys or {})
        self._count = 0

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        if any(k not in self.nodes for k in payloads):
            self.nodes |= by_key(self.grid.get_nodes(), self.keys)
        online = set(self.grid.get_node_ids())
        errors: Errors = {k: "the site is offline" for k in payloads if self.nodes.get(k) not in online}
        self._count += 1
        deadline = None if timeout is None else time.monotonic() + timeout
        pending: dict[str, int] = {}
        for client in sorted(set(payloads) - set(errors)):
            content, to = to_content(with_phase(phase, payloads[client])), self.nodes[client]
            message = Message(content, to, f"query.{ACTION}", ttl=timeout or 3600.0, group_id=f"{self._count}")
            (identity,) = self.grid.push_messages([message]) or (None,)
            if identity is None:
                errors[client] = "Flower did not accept the message"
            else:
                pending[identity] = client
        late = f"no reply within {timeout or 0:g} s"
        largest = max(map(size_of, payloads.values()), default=0)
        group = max(1, min(PULLED_MESSAGES, PULLED_BYTES // max(largest, 1)))
        most = REPLY_TIMES * largest + REPLY_BYTES
        while pending:
            waiting = list(pending)
            for i in range(0, len(waiting), group):
                with fetching_at_most(most):
                    self._pull(waiting[i : i + group], pending, errors, take)
            if pending and deadline is not None and time.monotonic() > deadline:
                break
            if pending:
                time.sleep(self.poll)
        if deadline is not None and time.monotonic() > deadline:  # messages live as long: Flower may notice first
            errors = {k: late if why == ERRORS[EXPIRED] else why for k, why in errors.items()}
        return errors | dict.fromkeys(pending.values(), late)

    def _pull(self, waiting: list[str], pending: dict[str, int], errors: Errors, take: Take) -> None:
        """Fetch the replies to some messages; those that are there are no longer pending."""
        for reply in self.grid.pull_messages(waiting):
            # An error reply names node 1 as its source, so clients are known by the message replied to.
            client = pending.pop(reply.metadata.reply_to_message_id, -1)
            if client < 0:
                continue  # a duplicate
            if reply.has_error():
                errors[client] = describe(reply.error.code, reply.error.reason)
                continue
            try:
                parts = from_content(reply.content)
            except (KeyError, AttributeError, TypeError, ValueError) as error:
                errors[client] = f"malformed reply ({type(error).__name__})"
            else:
                take(client, parts)


@contextlib.contextmanager
def fetching_at_most(most: int) -> Iterator[None]:
    """Have Flower's grid stop in the middle of a message that is larger than so many bytes, and make an error reply of
    it: one that a site sends in pieces without end would fill the server's memory before anybody has seen it."""
    if GRID is None:
        yield
        return
    whole = GRID.pull_objects

    def pull_objects(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
        left, lock = most, threading.Lock()

        def fetch(object_id: str) -> bytes:
            nonlocal left
            content = pull_object_fn(object_id)
            with lock:
                left -= len(content)
                if left < 0:
                    raise GRID.ObjectPullError(object_id, f"{TOO_LARGE} {most / 1e6:.0f} MB")
            return content

        return whole(object_ids, fetch, **options)

    GRID.pull_objects = pull_objects
    try:
        yield
    finally:
        GRID.pull_objects = whole


def describe(code: int, reason: str | None) -> str:
    """Return Flower's error in one line of our own. What the site's app raised goes to the log alone."""
    reason = reason or ""
    if code in SELF_EXPLAINING and (own_words := re.search(rf"{TOO_LARGE} \d+ MB$", reason)):
        return own_words[0]
    if reason and code not in SELF_EXPLAINING:
        log.warning("Flower's error %d: %s", code, clean(reason))
    if re.match(r"<class '[\w.]{1,80}WorkerError'>", reason):
        return "the site's worker could not answer; its worker.log says why"
    return ERRORS.get(code, f"error {code}")


def by_key(online: Iterable[Any], keys: Mapping[int, bytes]) -> dict[int, int]:
    """Return client -> node, for those of Flower's nodes that authenticate with a client's key."""
    nodes = {bytes(node.public_key): node.node_id for node in online}
    return {k: nodes[key] for k, key in keys.items() if key in nodes}


def wait_for_nodes(
    grid: Any,
    wanted: Mapping[int, bytes],
    n: int,
    timeout: float,
    poll: float = 1.0,
    names: Sequence[str] = (),
    quorum: float = 1.0,
) -> dict[int, int]:
    """Return client -> node, once all ``n`` sites are online, or after ``timeout`` seconds those that are, if they
    are a quorum. Sites are known by the public key they authenticate with.

    Args:
        wanted: client -> public key (as Flower stores it); empty takes the first ``n`` nodes by name, then id.
        names: of the clients, to say who is missing.
    """
    deadline = time.monotonic() + timeout
    while True:
        online = sorted(grid.get_nodes(), key=lambda node: (node.name, node.node_id))
        found = by_key(online, wanted) if wanted else {k: node.node_id for k, node in enumerate(online[:n])}
        if len(found) == n or time.monotonic() > deadline:
            break
        time.sleep(poll)
    if len(found) < least(quorum, n):
        missing = [names[k] if names else f"client {k}" for k in (wanted or range(n)) if k not in found]
        needed = f", {least(quorum, n)} are needed" if quorum < 1 else ""
        raise FedtailError(
            f"{len(found)} of {n} sites are online after {timeout:g} s{needed}; missing: {', '.join(missing)}; "
            "see `fedtail deploy status`, and the sites' logs"
        )
    return found
