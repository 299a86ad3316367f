"""Why a message brought nothing that could be used: one of a few fixed codes, each with one sentence of our own.

What a peer wrote is never repeated where runs are recorded or shown: a text may hold a patient's name, megabytes, or
escapes that a terminal obeys. A site answers with a code of this table; anything else counts as ``site``, and what it
said is cleaned and goes to the log alone.
"""

from __future__ import annotations

import logging

from fedtail.errors import FedtailError

CODES: dict[str, str] = {
    # The way there and back.
    "transport": "no usable reply arrived",
    "late": "no reply",
    # A message against what was declared for it.
    "too-large": "its message is larger than any valid reply",
    "malformed": "its message cannot be read",
    "unexpected": "its message contains something that was not requested",
    "out-of-range": "its message contains an impossible number",
    # What a message says against what was agreed or is possible.
    "changed": "it no longer matches what it agreed to in the handshake",
    "update": "its update cannot be used",
    # Runs that nobody steers.
    "agreement": "it has not agreed: documents, signatures or lists of sites differ; its audit.jsonl says in what",
    "check": "the sum that came back is not the sum of what the sites sent, or a site had nothing to add, such as one "
    "whose training diverged (lower local.lr): its audit.jsonl says so",
    "repeat": "it is at another exchange of this run",
    "disk": "its disk is full, or cannot be written",
    # What a site says of itself.
    "site": "it could not answer; its audit.jsonl says why",
    "data": "it cannot read its data, or the data do not fit the run; its audit.jsonl says why",
    "diverged": "a loss in local training was not finite; lower local.lr",
    "memory": "its worker ran out of memory; raise worker.memory_mb there",
    "encoder": "the encoder is missing or different there; install the same one everywhere",
    # What its policy forbids: which of its rules, and none of its values.
    "policy-trust": "site policy: it trusts no server with this; raise deploy.trust, or policy.trust there",
    "policy-sites": "site policy: it requires more sites",
    "policy-method": "site policy: the method is not allowed there",
    "policy-code": "site policy: the model, method or metric is custom code that is not on its list",
    "policy-encoder": "site policy: the encoder is not allowed there",
    "policy-size": "site policy: the message is too large",
    "policy-training": "the learning rate or the resampling rates are absurd",
    "policy-limit": "site policy: its privacy budget is used up",
    "policy-noise": "a sum that has no bound for its noise",
}
"""Code -> what is recorded and shown of it."""
LONGEST = 160
"""Characters of a text of ours, or of a peer's in the log."""
log = logging.getLogger("fedtail.federate")


class CodedError(FedtailError):
    """An error at a site. ``code`` is all that leaves it; the text stays in its logs."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Fault(str):
    """One line of our own words, which may name numbers that we have read, but no text of the peer's, and its code."""

    code: str

    def __new__(cls, code: str, text: str) -> Fault:
        out = super().__new__(cls, text)
        out.code = code
        return out


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
