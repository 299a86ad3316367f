"""A site's part in masked sums: what it agrees to be added up with whom, and the masks that hide its own numbers.

The server is not trusted. It names the members and carries the messages, but keys are those of the site's own list, a
number is used once, all members must have been asked the same, and no combination of the sums that were answered here
may tell of fewer sites than the policy says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.masks import (
    Release,
    add_pair_masks,
    derive,
    isolated,
    pair_seeds,
    stream,
    with_checks,
)
from fedtail.federate.protocol.keys import (
    is_signed,
    new_secret,
    public_half,
    read_roster,
    read_site_key,
    shared_secret,
    sign,
)
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.sums import LEAST, Order, SumError

COUNTS = "counts"
"""The scope of all counts: a site's splits are the same in every sum."""
KEEP = 64
"""Scopes of updates (a model, a round) that are remembered."""


@dataclass
class Answered:
    """Sums of one scope that this site has helped with."""

    question: str = ""
    """Of a scope whose sums must all ask the same; empty where they need not."""
    sets: list[list[str]] = field(default_factory=list)


class SiteSums:
    """Keys, numbers and sets of one site; all of it in a file that only the site's user can read."""

    def __init__(self, name: str, policy: Policy, folder: Path) -> None:
        self.name, self.policy, self.path = name, policy, folder / "sums.json"
        self.roster = read_roster(folder / "sites.pub")
        self.key = read_site_key(folder / "site.key")
        if self.roster.keys.get(name) != self.key.public_key():
            raise SumError("mask-keys", f"sites.pub and site.key have different keys for {name!r}; renew one of them")
        kept: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = kept.get("roster") == self.roster.digest  # another list of sites is another federation
        self.run: str = kept.get("run", "")
        self.secret = bytes.fromhex(kept.get("secret", ""))
        self.number: int = kept.get("number", 0)
        self.open: dict[str, Any] = kept.get("open", {})
        found = kept.get("answered", {}) if same else {}
        self.answered = {scope: Answered(**about) for scope, about in found.items()}
        self._checked: dict[str, bytes] = {}

    # -- keys -----------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """For the handshake: what the server must know to plan sums."""
        return {"roster": self.roster.digest, "least": self.least, "differences": self.policy.differences}

    def advert(self, run: str) -> dict[str, str]:
        """This site's key for a run, signed. A new run has a new key, and the old one is gone."""
        if run != self.run or not self.secret:
            self.run, self.secret, self.open, self._checked = run, new_secret(), {}, {}
            self._save()
        public = public_half(self.secret)
        signed = sign(self.key, run, self.roster.digest, self.name, public)
        return {"key": public.hex(), "signature": signed.hex()}

    @property
    def least(self) -> int:
        return max(self.policy.min_sites, LEAST)

    def _secrets(self, run: str, order: Order) -> dict[str, bytes]:
        """member -> what this site shares with it; ``SumError`` where the server put in a key of its own."""
        if run != self.run or not self.secret:
            raise SumError("mask-keys", "this site has no key for the run; it must say hello first")
        if self.name not in order.members or len(set(order.members)) < len(order.members):
            raise SumError("malformed", "the request for a masked sum does not name this site, or names one twice")
        if len(order.members) < self.least:
            raise SumError(
                "mask-few", f"a sum over {len(order.members)} sites; this site requires at least {self.least}"
            )
        out = {}
        for peer in order.members:
            if peer == self.name:
                continue
            if peer not in self.roster.keys:
                raise SumError("mask-keys", f"{peer!r} is not in sites.pub; give all sites the same list")
            out[peer] = self._shared(run, peer, order.adverts.get(peer, {}))
        return out

    def _shared(self, run: str, peer: str, advert: dict[str, str]) -> bytes:
        label = f"{peer} {advert.get('key')} {advert.get('signature')}"
        if label not in self._checked:
            try:
                public, signature = bytes.fromhex(advert["key"]), bytes.fromhex(advert["signature"])
                good = is_signed(self.roster.keys[peer], signature, run, self.roster.digest, peer, public)
                shared = shared_secret(self.secret, public) if good else b""
            except (KeyError, ValueError):
                shared = b""
            if not shared:
                said = (
                    f"the key for {peer!r} is not signed by the key in sites.pub, or that site has a different list "
                    "of sites"
                )
                raise SumError("mask-keys", said)
            self._checked[label] = shared
        return self._checked[label]

    # -- sums -----------------------------------------------------------------------------------------

    def mask_counts(self, run: str, order: Order, context: bytes, counts: np.ndarray) -> np.ndarray:
        """(n + 2,) what leaves of counts (n,). Without a mask of its own: once all members have answered, the sum is
        there, so the set counts as answered now."""
        secrets = self._secrets(run, order)
        self._check_sets([COUNTS], order.members, "")
        self._use(order.number)
        self._remember([COUNTS], order.members, "")
        return add_pair_masks(with_checks(counts), self.name, pair_seeds(self.name, secrets, order.members, context))

    def mask_update(
        self,
        run: str,
        order: Order,
        context: bytes,
        question: bytes,
        scopes: Sequence[str],
        enough: int,
        values: np.ndarray,
    ) -> np.ndarray:
        """(n + 2,) what leaves of an update in fixed point (n,), under a mask of its own too: until ``release``, no set
        of survivors has a sum. ``question``: the same in all sums of these scopes that are answered here; ``enough``:
        members without which there is none."""
        secrets = self._secrets(run, order)
        self._use(order.number)
        self.open = {
            "number": order.number,
            "members": list(order.members),
            "context": context.hex(),
            "question": question.hex(),
            "scopes": list(scopes),
            "enough": enough,
        }
        self._save()
        masked = add_pair_masks(with_checks(values), self.name, pair_seeds(self.name, secrets, order.members, context))
        masked += stream(self._own_seed(order.number), len(masked), masked.dtype)
        return masked

    def release(self, run: str, order: Order) -> Release:
        """What takes the masks off the sum over ``order.members``, the survivors of the last order; once."""
        now, left = self.open, order.members
        if not now or now["number"] != order.number:
            raise SumError("mask-repeat", "nothing to unmask here, or it was already unmasked")
        secrets = self._secrets(run, Order(order.number, tuple(now["members"]), order.adverts))
        if self.name not in left or not set(left) <= set(now["members"]):
            raise SumError("malformed", "the survivors are not members of the sum")
        if len(left) < max(self.least, now["enough"]):
            wanted = max(self.least, now["enough"])
            raise SumError("mask-few", f"{len(left)} of {len(now['members'])} sites are left, {wanted} are needed")
        context = bytes.fromhex(now["context"])
        self._check_sets(now["scopes"], left, now["question"])
        self.open = {}
        self._remember(now["scopes"], left, now["question"])
        seeds = pair_seeds(self.name, secrets, now["members"], context)
        return Release.of(self.name, self._own_seed(order.number), secrets, seeds, left, context)

    def _own_seed(self, number: int) -> bytes:
        return derive(self.secret, "own", number)

    def _check_sets(self, scopes: Sequence[str], members: Sequence[str], question: str) -> None:
        """Raise if this sum, with those answered before, would tell of too few sites, or of a changed question."""
        for scope in scopes:
            before = self.answered.get(scope)
            if before is None:
                continue
            if before.sets and before.question != question:
                raise SumError("mask-repeat", "the same model or round again, but with a different request")
            if sorted(members) in before.sets or self.policy.differences == "allow":
                continue
            alone = isolated([*before.sets, members], self.least)
            if alone:
                raise SumError(
                    "mask-difference",
                    f"this sum and earlier ones would reveal {', '.join(alone)} alone; wait until the same sites are "
                    "back, or set policy.differences = 'allow' at all sites",
                )

    def _remember(self, scopes: Sequence[str], members: Sequence[str], question: str) -> None:
        for scope in scopes:
            about = self.answered.setdefault(scope, Answered())
            about.question = question
            if sorted(members) not in about.sets:
                about.sets.append(sorted(members))
        recent = [scope for scope in self.answered if scope != COUNTS][:-KEEP]
        for scope in recent:
            del self.answered[scope]
        self._save()

    def _use(self, number: int) -> None:
        """A number is answered once: the same masks on two messages would give their difference away."""
        if number <= self.number:
            raise SumError("mask-repeat", "a request for a sum that is not newer than the last one")
        self.number = number
        self._save()

    def _save(self) -> None:
        kept = {
            "roster": self.roster.digest,
            "run": self.run,
            "secret": self.secret.hex(),
            "number": self.number,
            "open": self.open,
            "answered": {scope: vars(about) for scope, about in self.answered.items()},
        }
        temporary = self.path.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(kept, file)
        temporary.replace(self.path)
