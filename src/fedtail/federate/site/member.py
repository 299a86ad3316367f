"""A site's part in a run that nobody steers: its word on the document, and the run itself, an exchange per message.

The run is the same program that the simulator and the relay execute. It stands still whenever it needs a sum: its
masked answer leaves, and the sum that comes back with the next question, once verified, lets it go on.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtail.core.totals import LIMIT, Part, Reach
from fedtail.errors import FedtailError
from fedtail.federate import counted
from fedtail.federate.agreed import check_document, run_document, settings_of
from fedtail.federate.journal import Journal
from fedtail.federate.protocol.agreement import LEAST, AgreementError, Offer, Party, canonical
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import method_of
from fedtail.federate.protocol.keys import Roster, read_roster, read_site_key
from fedtail.federate.protocol.limits import whole
from fedtail.federate.protocol.masks import SEED, MaskError, share_of_noise
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.sums import check_sums, hide, read_sums
from fedtail.federate.protocol.transport import Phase
from fedtail.federate.protocol.wire import Parcel, Parts, pack, unpack
from fedtail.federate.site.ledger import Ledger
from fedtail.federate.site.prepared import SiteData
from fedtail.federate.summed import check_sums_only, groups_of
from fedtail.files import sync, write_atomically
from fedtail.models.encoders import Encoding, open_encoder
from fedtail.settings import PrivacySettings

SLACK = 1 + 1e-4
"""More noise than the multiplier asks for: it covers rounding."""


Ask = Callable[[int, Parts], Parts]
"""(number, answer) -> what came of an exchange, when the next question has brought it."""
Program = Callable[[Party, Ask], str]
"""What a site computes under an agreement; the result is a digest of the model."""


class SumError(CodedError):
    """An exchange that a site takes no part in, or a sum that it does not believe."""


@dataclass(frozen=True)
class Noise:
    """Shares of Gaussian noise under the masks."""

    multiplier: float
    charge: Callable[[int], None]
    """Enter an exchange in the site's ledger before its answer leaves; raises once the budget is spent."""


class SiteTotals:
    """``core.totals.Totals`` at one site: its own part, masked, for the sum of all."""

    def __init__(
        self,
        party: Party,
        groups: Sequence[Sequence[int]],
        journal: Journal,
        ask: Ask,
        noise: Noise | None = None,
    ) -> None:
        """``ask(number, answer)``: hands out the answer to an exchange and returns what came of it."""
        self.party, self.journal, self.ask, self.noise = party, journal, ask, noise
        self.names = list(party.document["sites"])
        self.groups, self.n_clients = groups, len(self.names)
        self.here = (self.names.index(party.name),)
        self.number = 0
        """Exchanges so far."""
        self._pairs = party.pairs()

    def total(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        return self._sum([range(self.n_clients)], size, part, limit, reach)[0]

    def group_totals(self, size: int, part: Part, *, limit: int = LIMIT, reach: Reach = np.inf) -> np.ndarray:
        return self._sum(self.groups, size, part, limit, reach)

    def _sum(self, groups: Sequence[Sequence[int]], size: int, part: Part, limit: int, reach: Reach) -> np.ndarray:
        self.number = number = self.number + 1
        members = [[self.names[k] for k in sorted(group)] for group in groups]
        told = self.journal.read("sum", number)
        if told is None:
            answer = self.journal.read("answer", number)
            if answer is None:
                answer = self._answer(number, members, size, part, limit, reach)
                self.journal.write("answer", number, answer)
            told = self.ask(number, answer)
            found = self._verified(number, members, size, limit, told)
            self.journal.write("sum", number, told)
            self.journal.forget("answer", [number - 1])
            return found
        return self._verified(number, members, size, limit, told)

    def _answer(self, number: int, members: list[list[str]], size: int, part: Part, limit: int, reach: Reach) -> Parts:
        values = np.asarray(part(self.here[0]), dtype=np.int64)
        if values.shape != (size,):
            raise SumError("site", f"exchange {number} is of {size} numbers, this site has {values.shape}")
        mine = next(group for group in members if self.party.name in group)
        if self.noise is not None:
            if not np.all(np.isfinite(reach)):
                raise SumError("policy-noise", f"exchange {number} has no bound on what one row can change")
            self.noise.charge(number)
            deviation = reach * (self.noise.multiplier * SLACK / np.sqrt(len(mine)))
            values = values + share_of_noise(size, deviation, os.urandom(SEED), "share")
        return pack(hide(values, self.party.name, self._pairs, self.party.common, number, mine, limit))

    def _verified(self, number: int, members: list[list[str]], size: int, limit: int, told: Parts) -> np.ndarray:
        try:
            found, checks = read_sums(unpack(told), len(members), size, limit)
            check_sums(found, checks, self.party.common, number, members)
        except (FedtailError, MaskError) as error:
            raise SumError("check", f"exchange {number}: {error}; this site goes no further with it") from None
        return found


class Conversation:
    """A program in a thread of its own, whose sums are asked for by one message each."""

    def __init__(self, start: Callable[[Ask], str]) -> None:
        """``start(ask)`` runs the program."""
        self._out: queue.Queue[tuple[int, Parts | str | BaseException]] = queue.Queue()
        self._in: queue.Queue[Parts | None] = queue.Queue()
        self._start = start
        self._now: tuple[int, Parts | str | BaseException] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._out.put((0, self._start(self._ask)))
        except BaseException as error:  # handed to whoever waits for the next answer
            self._out.put((-1, error))

    def _ask(self, number: int, answer: Parts) -> Parts:
        self._out.put((number, answer))
        told = self._in.get()
        if told is None:
            raise SumError("repeat", "the run was begun again")
        return told

    def close(self) -> None:
        """End the program where it waits."""
        self._in.put(None)

    def step(self, number: int, told: Parts | None) -> Parts | str:
        """The answer to exchange ``number``, or the program's result; ``told``: what came of the exchange before it."""
        if self._now is None:
            self._now = self._next()
        if self._now[0] == number - 1 and told is not None and self._now[0] > 0:
            self._in.put(told)
            self._now = self._next()
        at, value = self._now
        if at not in (0, number):
            raise SumError("repeat", f"exchange {number} is asked for, this site is at {at}")
        assert not isinstance(value, BaseException)
        return value

    def _next(self) -> tuple[int, Parts | str | BaseException]:
        at, value = self._out.get()
        if isinstance(value, BaseException):
            raise value
        return at, value


class Member:
    """A site with keys: offers, agreements and runs, in files of its folder that only its user can read."""

    def __init__(
        self, name: str, data: SiteData, policy: Policy, ledger: Ledger, folder: Path | None, device: torch.device
    ) -> None:
        if folder is None or not all((folder / file).is_file() for file in ("sites.pub", "site.key")):
            raise AgreementError("this site has no key, or no list of sites (sites.pub); see `fedtail site keys`")
        self.name, self.data, self.policy, self.ledger, self.device = name, data, policy, ledger, device
        self.folder = folder / "agreements"
        self.roster: Roster = read_roster(folder / "sites.pub")
        self.key = read_site_key(folder / "site.key")
        if name not in self.roster.lines or self.roster.key(name) != self.key.public_key():
            raise AgreementError(f"sites.pub and site.key have different keys for {name!r}")
        self._running: tuple[str, Conversation] | None = None

    def answer(self, phase: str, parcel: Parcel) -> Parts:
        """The reply to one message."""
        meta = parcel.meta
        if phase == Phase.OFFER:
            return pack(Parcel({"offer": vars(self.offer(meta.get("document")))}))
        if phase == Phase.REVEAL:
            told = _mapping(meta.get("offers"))
            number, shares = self.reveal({name: Offer.from_json(offer) for name, offer in told.items()})
            return pack(Parcel({"number": number, "shares": shares}))
        if phase == Phase.BEGIN:
            self.begin(_mapping(meta.get("numbers")), _mapping(meta.get("shares")))
            return pack(Parcel())
        found = self.step(str(meta.get("agreement")), whole(meta.get("number"), 1, 1 << 40, "number"), parcel)
        return pack(Parcel({"done": found})) if isinstance(found, str) else found

    # -- before the first exchange -------------------------------------------------------------------------------

    def offer(self, document: Any) -> Offer:
        """This site's word on a document, if neither its policy nor its schema has anything against it. A later offer
        takes the place of an earlier one."""
        check_document(document, self.name, self.roster.names)
        self.policy.check_document(document)
        if "what" in document:
            counted.check_question(document)
            counted.find_model(self.folder.parent, document["model"])
            return self._offer(document)
        if canonical(self._schema(document)) != canonical(document["schema"]):
            raise AgreementError("the document describes other data than this site has: columns, classes or encoder")
        settings = settings_of(document)
        check_sums_only(settings, method_of(settings), "the document")
        self._check_groups(groups_of(settings, len(document["sites"]), LEAST, "the document"), document["sites"])
        return self._offer(document)

    def _offer(self, document: dict[str, Any]) -> Offer:
        party = Party(self.name, document)
        self._save("offer", party)
        return party.offer(self.key, self.roster)

    def _schema(self, document: dict[str, Any]) -> dict[str, Any]:
        """What this site's own data are, with the encoder of the document as it is here."""
        schema, wanted = self.data.schema(), document["schema"].get("encoder")
        if not wanted:
            return schema
        told = Encoding.from_dict(wanted)
        self.policy.check_encoder(told.name)
        try:
            return {**schema, "encoder": open_encoder(told.name, told.weights).use(told.views, told.unfreeze).to_dict()}
        except FedtailError as error:
            raise CodedError("encoder", str(error)) from None

    def _check_groups(self, groups: list[list[int]], names: list[str]) -> None:
        """Clusters go with the list of sites: sums over other clusters of the same sites would tell, by difference, of
        single ones."""
        if len(groups) == 1:
            return
        file, found = self.folder / "clusters.json", sorted(sorted(names[k] for k in group) for group in groups)
        before = json.loads(file.read_text()) if file.is_file() else {}
        if before.setdefault(self.roster.digest, found) != found:
            raise AgreementError("other clusters of the same sites than in an earlier run; give them as they were")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_atomically(file, json.dumps(before))

    def reveal(self, offers: dict[str, Offer]) -> tuple[str, dict[str, str]]:
        """Its part of the seed and of the common key, once everybody has signed the same."""
        party = self._load("offer")
        number, shares = party.reveal(self.roster, offers)
        self._save("offer", party)
        return number, shares

    def begin(self, numbers: dict[str, str], shares: dict[str, str]) -> Party:
        """The agreement, which stands from now on."""
        party = self._load("offer")
        party.begin(numbers, shares)
        self._save(party.id, party)
        return party

    def party(self, agreement: str) -> Party:
        """An agreement that stands; ``AgreementError`` if there is none of this name."""
        if len(agreement) != 64 or set(agreement) - set("0123456789abcdef"):
            raise AgreementError("an agreement that has no such name")
        party = self._load(agreement)
        if not party.common:
            raise AgreementError("the sites have not agreed yet")
        return party

    def _save(self, name: str, party: Party) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        file = self.folder / f"{name[:24]}.json"
        partial = file.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            json.dump(party.to_json(), out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
        sync(self.folder)

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
        told = pack(Parcel({"checks": parcel.meta.get("checks")}, parcel.tensors)) if parcel.tensors else None
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
            return counted.answer_question(document, totals, self.data, self.name, self.folder.parent)
        settings = settings_of(document, party.seed)
        groups = groups_of(settings, len(document["sites"]), LEAST, "the document")
        noise = None
        if document["trust"] == "private":
            noise = Noise(settings.privacy.noise, lambda number: self._charge(party.id, number, settings.privacy))
        totals = SiteTotals(party, groups, journal, ask, noise)
        me = totals.here[0]
        _, digest = run_document(
            document, party.seed, totals, {me: self.data}, home / "run", journal, device=str(self.device), engine="site"
        )
        return digest

    def _charge(self, agreement: str, number: int, privacy: PrivacySettings) -> None:
        """Enter what the answer to an exchange costs, and refuse what the site's budget does not cover."""
        spent = self.ledger.releases()
        self.policy.check_epsilon({**spent, privacy.noise: spent.get(privacy.noise, 0) + 1})
        self.ledger.charge("releases", f"{agreement}/{number}", 0, noise=privacy.noise)


def _mapping(told: object) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise AgreementError("a message without what it should bring")
    return told
