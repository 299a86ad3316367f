"""A site's part in a run by totals: its word on the document, and the run itself, an exchange per message.

The run is the same program that the simulator and the relay execute. It stands still whenever it needs a sum: its
masked answer leaves, and the sum that comes back with the next question, once verified, lets it go on. For a server
that the site trusts it runs the same way, without signatures and masks.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedtail.core.totals import Part, Reach
from fedtail.errors import FedtailError
from fedtail.federate import counted
from fedtail.federate.agreed import FILES, check_document, check_sites, digest_of, run_document, settings_of
from fedtail.federate.exchanges import Exchanges, Journal, write_durably
from fedtail.federate.protocol.agreement import (
    AgreementError,
    Offer,
    Party,
    Roster,
    canonical,
    read_roster,
    read_site_key,
)
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import method_of
from fedtail.federate.protocol.limits import whole
from fedtail.federate.protocol.masks import COARSE, MaskError, bare, check_sums, derive, hide, read_sums, share_of_noise
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, Parts, pack, under, unpack
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.prepared import SiteData
from fedtail.federate.site.site import encoding_here, need_trust
from fedtail.federate.summed import check_sums_only, groups_of
from fedtail.models.encoders.base import Encoding

SLACK = 1 + 1e-4
"""More noise than the multiplier asks for: it covers rounding."""
Ask = Callable[[int, Parts], Parcel]
"""(number, answer) -> what came of an exchange, when the next question has brought it."""
ANSWER, BEFORE = "answer/", "before/"
"""Parts of what a site has on disk of an exchange: its answer, and the sum of the exchange before."""


class SumError(CodedError):
    """An exchange that a site takes no part in, or a sum that it does not believe."""


class SiteTotals(Exchanges):
    """``core.totals.Totals`` at one site: its own part, masked, for the sum of all."""

    def __init__(
        self,
        party: Party,
        groups: Sequence[Sequence[int]],
        journal: Journal,
        ask: Ask,
        noise: float = 0.0,
        charge: Callable[[int], None] = lambda number: None,
    ) -> None:
        """ask: hands out the answer to an exchange and returns what came of it. noise: multiplier of the Gaussian noise
        under the masks; charge: enters an exchange in the site's ledger, and raises once the budget is spent."""
        super().__init__(party.document["sites"], groups, journal)
        self.party, self.ask, self.noise, self.charge = party, ask, noise, charge
        self.here = (self.names.index(party.name),)
        self._pairs = party.pairs()
        self._failed = ""
        self._last: Parcel | None = None
        """The last sum goes to disk with the next answer: what is lost before has not been used for anything that left,
        and is told again."""

    def sums(
        self, number: int, groups: Sequence[Sequence[int]], size: int, part: Part, limit: int, reach: Reach
    ) -> np.ndarray:
        members = [[self.names[k] for k in sorted(group)] for group in groups]
        later = self.journal.read(number + 1)
        if later is not None and (told := under(later, BEFORE)):
            return self._verified(number, members, size, limit, unpack(told))
        answer = under(self.journal.read(number) or {}, ANSWER)
        if not answer:
            answer = self._answer(number, members, size, part, limit, reach)
            before = {} if self._last is None else prefixed(BEFORE, pack(self._last))
            answer = under(self.journal.settle(number, prefixed(ANSWER, answer) | before), ANSWER)
        self._last = self.ask(number, answer)
        return self._verified(number, members, size, limit, self._last)

    def forget(self, since: int, number: int) -> None:
        self.journal.forget(range(since + 2, number + 1))

    def _answer(self, number: int, members: list[list[str]], size: int, part: Part, limit: int, reach: Reach) -> Parts:
        common = self.party.common
        try:
            values = np.asarray(part(self.here[0]), dtype=np.int64)
        except Exception as error:
            if self.party.plain or isinstance(error, OSError | MemoryError):
                raise
            # Silence would tell of this site's data. This looks like any answer, and no sum that has it is believed.
            self._failed = f"; this site had nothing to add: {error}"
            values, common = np.frombuffer(os.urandom(8 * size), dtype=np.int64), os.urandom(len(common))
        if values.shape != (size,):
            raise SumError("site", f"exchange {number} is of {size} numbers, this site has {values.shape}")
        if self.party.plain:
            return pack(bare(values, number, limit))
        own = next(group for group in members if self.party.name in group)
        if self.noise:
            deviation = reach * (self.noise * SLACK / np.sqrt(len(own)))
            if not np.all(deviation <= COARSE):
                said = "no bound on what one row can change, or noise that no sum can hold"
                raise SumError("policy-noise", f"exchange {number} has {said}")
            self.charge(number)
            secret = derive(self.party.secret, "noise", number, values.tobytes())  # also when it is computed again
            values = values + share_of_noise(size, deviation, secret, "share")
        return pack(hide(values, self.party.name, self._pairs, common, number, own, limit))

    def _verified(self, number: int, members: list[list[str]], size: int, limit: int, told: Parcel) -> np.ndarray:
        try:
            found, checks = read_sums(told, len(members), size, limit)
            if not self.party.plain:
                check_sums(found, checks, self.party.common, number, members)
        except (FedtailError, MaskError) as error:
            raise SumError("check", f"exchange {number}: {error}; this site goes no further{self._failed}") from None
        return found


def prefixed(prefix: str, parts: Parts) -> Parts:
    return {f"{prefix}{name}": data for name, data in parts.items()}


class Conversation:
    """A program in a thread of its own, whose sums are asked for by one message each."""

    def __init__(self, start: Callable[[Ask], str]) -> None:
        """``start(ask)`` runs the program."""
        self._out: queue.Queue[tuple[int, Parts | str | BaseException]] = queue.Queue()
        self._in: queue.Queue[Parcel | None] = queue.Queue()
        self._now: tuple[int, Parts | str] | None = None
        threading.Thread(target=self._run, args=(start,), daemon=True).start()

    def _run(self, start: Callable[[Ask], str]) -> None:
        try:
            self._out.put((0, start(self._ask)))
        except BaseException as error:  # handed to whoever waits for the next answer
            self._out.put((-1, error))

    def _ask(self, number: int, answer: Parts) -> Parcel:
        self._out.put((number, answer))
        told = self._in.get()
        if told is None:
            raise SumError("repeat", "the run was begun again")
        return told

    def close(self) -> None:
        """End the program where it waits."""
        self._in.put(None)

    def step(self, number: int, told: Parcel | None) -> Parts | str:
        """The answer to exchange ``number``, or the program's result; ``told``: what came of the exchange before it."""
        at, value = self._now = self._now or self._next()
        if at == number - 1 and told is not None and at > 0:
            self._in.put(told)
            at, value = self._now = self._next()
        if at not in (0, number):
            raise SumError("repeat", f"exchange {number} is asked for, this site is at {at}")
        return value

    def _next(self) -> tuple[int, Parts | str]:
        at, value = self._out.get()
        if isinstance(value, BaseException):
            raise value
        return at, value


class Member:
    """A site in runs by totals: offers, agreements and runs, in files of its folder that only its user can read."""

    def __init__(
        self, name: str, data: SiteData, policy: Policy, ledger: Ledger, folder: Path, device: torch.device
    ) -> None:
        self.name, self.data, self.policy, self.ledger, self.device = name, data, policy, ledger, device
        self.home, self.folder = folder, folder / "agreements"
        self._running: tuple[str, Conversation] | None = None

    @cached_property
    def keys(self) -> tuple[Roster, ec.EllipticCurvePrivateKey]:
        """The list of sites, and this one's own key."""
        if not all((self.home / file).is_file() for file in ("sites.pub", "site.key")):
            raise AgreementError("this site has no key, or no list of sites (sites.pub); see `fedtail site keys`")
        roster, key = read_roster(self.home / "sites.pub"), read_site_key(self.home / "site.key")
        if self.name not in roster.lines or roster.key(self.name) != key.public_key():
            raise AgreementError(f"sites.pub and site.key have different keys for {self.name!r}")
        return roster, key

    def answer(self, phase: str, parcel: Parcel) -> Parts:
        """The reply to one message."""
        meta = parcel.meta
        told: dict[str, Any] = {}
        if phase == Phase.OFFER:
            told = {"offer": vars(self.offer(meta.get("document")))}
        elif phase == Phase.REVEAL:
            offers = _mapping(meta.get("offers"))
            number, shares = self.reveal({name: Offer.from_json(offer) for name, offer in offers.items()})
            told = {"number": number, "shares": shares}
        elif phase == Phase.BEGIN and "document" in meta:
            self.begin_plainly(parcel)
        elif phase == Phase.BEGIN:
            self.begin(_mapping(meta.get("numbers")), _mapping(meta.get("shares")))
        else:
            found = self.step(str(meta.get("agreement")), whole(meta.get("number"), 1, 1 << 40, "number"), parcel)
            if not isinstance(found, str):
                return found
            told = {"done": found}
        return pack(Parcel(told))

    # -- before the first exchange -------------------------------------------------------------------------------

    def offer(self, document: Any) -> Offer:
        """This site's word on a document, if neither its policy nor its schema has anything against it. A later offer
        takes the place of an earlier one."""
        roster, key = self.keys
        check_document(document)
        check_sites(document, self.name, roster.names)
        self.policy.check_document(document)
        if "what" in document:
            counted.find_model(self.home, document["model"])
        else:
            self._check_run(document)
            groups = groups_of(settings_of(document), len(document["sites"]), self.policy.min_sites)
            self._check_clusters(groups, document["sites"])
        party = Party(self.name, document)
        self._save("offer", party)
        return party.offer(key, roster)

    def _check_run(self, document: Mapping[str, Any]) -> None:
        """Raise unless a document is about this site's data, and needs no more than sums."""
        schema, told = self.data.schema(), document["schema"]
        if wanted := told.get("encoder"):
            schema |= {"encoder": encoding_here(Encoding.from_dict(wanted), self.policy).to_dict()}
        if canonical(schema) != canonical(told):
            wrong = [k for k in {**schema, **told} if canonical(schema.get(k, {})) != canonical(told.get(k, {}))]
            raise AgreementError(f"the document describes other data than this site has; other: {', '.join(wrong)}")
        self._predecessor(document)
        settings = settings_of(document)
        check_sums_only(settings, method_of(settings))

    def _predecessor(self, document: Mapping[str, Any]) -> Path | None:
        """The run folder whose model a document goes on from. A site that took part in that run knows it; others take
        the word of those, whose signatures are awaited, and have the model from their operator."""
        after = document.get("after")
        if after is None:
            return None
        if self.name not in after["sites"]:
            if not set(map(str, after["sites"])) & set(document["sites"]):
                raise AgreementError("the document goes on from a run of which none of its sites was part")
            return counted.find_model(self.home, str(after["model"]))
        party = self.party(str(after["agreement"]))
        before, folder = party.document, self.folder / party.id[:24] / "run"
        same = [before["sites"], before.get("schema"), digest_of(folder) if (folder / FILES[1]).is_file() else ""]
        if party.id != after["agreement"] or same != [after["sites"], document["schema"], after["model"]]:
            raise AgreementError("the document goes on from another run than this site knows, or with other data")
        return folder

    def _check_clusters(self, groups: list[list[int]], names: list[str]) -> None:
        """Clusters go with the list of sites: sums over other clusters of the same sites would tell, by difference, of
        single ones."""
        if len(groups) == 1:
            return
        file, found = self.folder / "clusters.json", sorted(sorted(names[k] for k in group) for group in groups)
        before = json.loads(file.read_text()) if file.is_file() else {}
        if before.setdefault(self.keys[0].digest, found) != found:
            raise AgreementError("other clusters of the same sites than in an earlier run; give them as they were")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_durably(file, [json.dumps(before).encode()])

    def reveal(self, offers: dict[str, Offer]) -> tuple[str, dict[str, str]]:
        """Its part of the seed and of the common key, once everybody has signed the same."""
        party = self._load("offer")
        number, shares = party.reveal(self.keys[0], offers)
        self._save("offer", party)
        return number, shares

    def begin(self, numbers: dict[str, str], shares: dict[str, str]) -> Party:
        """The agreement, which stands from now on."""
        party = self._load("offer")
        party.begin(numbers, shares)
        self._save(party.id, party)
        return party

    def begin_plainly(self, parcel: Parcel) -> None:
        """The same for a server that this site trusts: it chooses the seed and, for counts, brings the model."""
        document = parcel.meta["document"]
        check_document(document)
        if document["trust"] != "server" or self.name not in document["sites"]:
            raise AgreementError("a document that nobody has signed")
        need_trust(self.policy, self.data)
        self.policy.check_code(document)
        party = Party(self.name, document, number=bytes.fromhex(str(parcel.meta.get("number"))))
        party.seed = whole(parcel.meta.get("seed"), 0, 1 << 62, "seed")
        if "what" in document:
            counted.keep_model(self.folder / party.id[:24], parcel.tensors)
        else:
            self._check_run(document)
        self._save(party.id, party)

    def party(self, agreement: str) -> Party:
        """An agreement that stands; ``AgreementError`` if there is none of this name."""
        if len(agreement) != 64 or set(agreement) - set("0123456789abcdef"):
            raise AgreementError("an agreement that has no such name")
        party = self._load(agreement)
        if party.plain:
            need_trust(self.policy, self.data)
        elif not party.common:
            raise AgreementError("the sites have not agreed yet")
        return party

    def _save(self, name: str, party: Party) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_durably(self.folder / f"{name[:24]}.json", [json.dumps(party.to_json()).encode()])

    def _load(self, name: str) -> Party:
        file = self.folder / f"{name[:24]}.json"
        if not file.is_file():
            raise AgreementError("nothing was offered or agreed here under this name")
        return Party.from_json(json.loads(file.read_text()))

    # -- the run -------------------------------------------------------------------------------------------------

    def step(self, agreement: str, number: int, parcel: Parcel) -> Parts | str:
        """The answer to an exchange of an agreement, or the digest of the model that the run has come to. What fails is
        begun again, from disk, with the next message."""
        if self._running is None or self._running[0] != agreement:
            party = self.party(agreement)
            if self._running is not None:
                self._running[1].close()
            self._running = (agreement, Conversation(lambda ask: self.run(party, ask)))
        told = Parcel({"checks": parcel.meta.get("checks")}, parcel.tensors) if parcel.tensors else None
        try:
            return self._running[1].step(number, told)
        except BaseException as error:
            if not isinstance(error, SumError) or error.code != "repeat":
                self._running[1].close()
                self._running = None
            raise

    def run(self, party: Party, ask: Ask) -> str:
        """The program of an agreement with this site's data; its run folder stays here."""
        home, document = self.folder / party.id[:24], party.document
        journal = Journal(home / "journal")
        if "what" in document:
            totals = SiteTotals(party, [range(len(document["sites"]))], journal, ask)
            model = home if party.plain else counted.find_model(self.home, document["model"])
            return counted.answer_question(document, totals, model, self.data, self.name, self.home)
        settings = settings_of(document, party.seed)
        noise = settings.privacy.noise if document["trust"] == "private" else 0.0

        def charge(number: int) -> None:
            """Enter what the answer to an exchange costs, and refuse what the site's budget does not cover."""
            self.ledger.charge(f"{party.id}/{number}", noise, self.policy.check_epsilon)

        totals = SiteTotals(party, groups_of(settings, len(document["sites"])), journal, ask, noise, charge)
        data, device = {totals.here[0]: self.data}, str(self.device)
        begun = self._predecessor(document)
        folder, seed = home / "run", party.seed
        return run_document(document, seed, totals, data, folder, begun=begun, device=device, engine="site")[1]


def _mapping(told: object) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise AgreementError("a message without what it should bring")
    return told
