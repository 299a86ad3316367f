"""Why a message brought nothing that could be used: one of a few fixed codes, each with one sentence of our own.

What a peer wrote is never repeated where runs are recorded or shown: a text may hold a patient's name, megabytes, or
escapes that a terminal obeys. A site answers with a code of this table; anything else counts as ``site``, and what it
said is cleaned and goes to the log alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

CODES: dict[str, str] = {
    # The way there and back.
    "transport": "no usable reply came through",
    "late": "no reply",
    # A message against what was declared for it.
    "too-large": "its message is larger than what was asked for can be",
    "malformed": "its message cannot be read",
    "unexpected": "its message holds what was not asked for",
    "out-of-range": "its message holds a number that cannot be",
    # What a message says against what was agreed or is possible.
    "changed": "it changed what it had agreed to in the handshake",
    "update": "its update cannot be taken",
    # What a site says of itself.
    "site": "it could not answer; its own log says why",
}
"""Code -> what is recorded and shown of it."""
LONGEST = 160
"""Characters of a text of ours, or of a peer's in the log."""
log = logging.getLogger("fedtail.federate")


@dataclass(frozen=True)
class Fault:
    """A code and one line of our own words, which may name numbers that we have read, but no text of the peer's."""

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


def clean(text: object, most: int = LONGEST) -> str:
    """At most ``most`` printable characters on one line; no terminal escape, no other control character."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 8 * most]).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def from_site(client: int, said: object) -> Fault:
    """The fault of a site that answers with an error: its code where it is one of ours."""
    if isinstance(said, str) and said in CODES:
        return Fault(said, CODES[said])
    log.warning("client %d says: %s", client, clean(said))
    return Fault("site", CODES["site"])
