"""The server's part in a run that nobody steers: it carries offers, adds up what it cannot read, and tells the sums.

It learns what everybody learns. What it alters is not believed, and what it keeps back stops the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedtail.core.records import Tensors
from fedtail.core.totals import Part, Reach
from fedtail.errors import FedtailError
from fedtail.federate.agreed import DOCUMENT, Hooks, OnWait, declared_schema, run_document, write_document
from fedtail.federate.exchanges import Exchanges, Journal
from fedtail.federate.protocol.agreement import Offer, canonical, id_of, plain_id, seed_of
from fedtail.federate.protocol.faults import log
from fedtail.federate.protocol.handshake import agree, say_hello
from fedtail.federate.protocol.limits import Budget, WireError
from fedtail.federate.protocol.masks import SEED, Sum, answer_budget, pack_sums, read_answer, read_sums
from fedtail.federate.protocol.transport import Phase, Traffic, Transport, exchange
from fedtail.federate.protocol.wire import Parcel, pack, unpack
from fedtail.federate.summed import groups_of
from fedtail.files import write_atomically
from fedtail.runs.folder import choose_folder, claimed, run_name
from fedtail.runs.result import Result
from fedtail.settings import Settings

PASSING = ("transport", "late", "disk", "memory")
"""Faults after which a site is asked the same again: it is not there, or not yet."""
PATIENCE, PAUSE = 86400.0, 2.0
"""Seconds for which a site that is not there is waited for, and between two questions to it."""


class Relay:
    """The sites of an agreement, as the server reaches them. ``names[k]`` is the site behind client k."""

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        timeout: float,
        on_wait: OnWait | None = None,
    ) -> None:
        """on_wait: told whom an exchange waits for and why, and nothing once it goes on."""
        self.transport, self.names, self.timeout = transport, list(names), timeout
        self.on_wait = on_wait or (lambda line: None)
        self.traffic = Traffic()

    def ask(self, phase: Phase, parcels: Mapping[int, Parcel], read: Any, budget: Budget) -> dict[int, Any]:
        """What ``read`` makes of the reply of every site, however long the last one takes; ``FedtailError`` with the
        words of a site that will not answer."""
        found: dict[int, Any] = {}
        began, told = time.monotonic(), ""
        while missing := {k: parcels[k] for k in parcels if k not in found}:
            answers = exchange(self.transport, phase, missing, read, self.timeout, budget)
            found |= answers.good
            self.traffic += answers.traffic
            final = {k: reason for k, reason in answers.reasons.items() if reason.code not in PASSING}
            waited = time.monotonic() - began
            if final or (answers.reasons and waited > PATIENCE):
                who = self._who(final or answers.reasons)
                raise FedtailError(f"the run cannot go on without all of its sites ({who})")
            if answers.reasons:
                line = self._who(answers.reasons)
                if line != told:
                    log.warning("%s: waiting for %s", phase, line)
                    self.on_wait(line)
                told = line
                time.sleep(min(PAUSE, max(PATIENCE - waited, 0.0)))
        if told:
            self.on_wait("")
        return dict(sorted(found.items()))

    def _who(self, reasons: Mapping[int, str]) -> str:
        """Each reason once, after the sites that it is told of."""
        sites: dict[str, list[str]] = {}
        for k, reason in sorted(reasons.items()):
            sites.setdefault(str(reason), []).append(self.names[k])
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in sites.items())

    def begin(self, document: Mapping[str, Any], seed: int = 0, tensors: Tensors | None = None) -> tuple[str, int]:
        """(the agreement's name, the run's seed). Sites sign the document and draw the seed, or take both from a server
        that they trust, with the ``tensors`` of a model that they are to count with."""
        if document["trust"] != "server":
            return self.agree(document)
        number = os.urandom(SEED).hex()
        parcel = Parcel({"document": document, "seed": seed, "number": number}, tensors or {})
        self.ask(Phase.BEGIN, dict.fromkeys(range(len(self.names)), parcel), lambda k, parcel: None, Budget())
        return plain_id(document, number), seed

    def agree(self, document: Mapping[str, Any]) -> tuple[str, int]:
        """The same once all sites have signed the document and revealed their parts."""
        clients, wide = range(len(self.names)), Budget(meta=1 << 20, items=1 << 12)
        offers = self.ask(
            Phase.OFFER,
            {k: Parcel({"document": document}) for k in clients},
            lambda k, parcel: Offer.from_json(parcel.meta.get("offer")),
            wide,
        )
        told = {self.names[k]: vars(offer) for k, offer in offers.items()}

        def read(client: int, parcel: Parcel) -> tuple[str, dict[str, str]]:
            number, shares = parcel.meta.get("number"), parcel.meta.get("shares")
            if not isinstance(number, str) or not isinstance(shares, dict):
                raise WireError("it reveals nothing")
            return number, shares

        revealed = self.ask(Phase.REVEAL, {k: Parcel({"offers": told}) for k in clients}, read, wide)
        numbers = {self.names[k]: number for k, (number, _) in revealed.items()}
        parcels = {}
        for k, name in enumerate(self.names):
            shares = {self.names[j]: sealed.get(name, "") for j, (_, sealed) in revealed.items() if j != k}
            parcels[k] = Parcel({"numbers": numbers, "shares": shares})
        self.ask(Phase.BEGIN, parcels, lambda k, parcel: None, Budget())
        agreement = id_of({self.names[k]: offer for k, offer in offers.items()})
        return agreement, seed_of(agreement, numbers)


class RelayTotals(Exchanges):
    """``core.totals.Totals`` at the server, which has no part of its own."""

    def __init__(self, relay: Relay, agreement: str, groups: Sequence[Sequence[int]], journal: Journal) -> None:
        super().__init__(relay.names, groups, journal)
        self.relay, self.agreement = relay, agreement

    def sums(
        self, number: int, groups: Sequence[Sequence[int]], size: int, part: Part, limit: int, reach: Reach
    ) -> np.ndarray:
        told = self._told(number)
        if told is None:
            sums = [Sum(size, limit) for _ in groups]
            of = {k: sums[g] for g, group in enumerate(groups) for k in group}

            def add(client: int, parcel: Parcel) -> None:
                of[client].add(*read_answer(parcel, number, limit))

            self.relay.ask(Phase.STEP, self._questions(number), add, answer_budget(size, limit))
            told = pack_sums(sums)
            self.journal.write(number, pack(told))
        return read_sums(told, len(groups), size, limit)[0]

    def _told(self, number: int) -> Parcel | None:
        """What came of an exchange."""
        parts = self.journal.read(number)
        return None if parts is None else unpack(parts)

    def forget(self, since: int, number: int) -> None:
        self.journal.forget(range(since + 1, number))

    def finish(self) -> dict[int, str]:
        """Tell the last sum; client -> the digest of the model that each site has come to."""

        def read(client: int, parcel: Parcel) -> str:
            if not isinstance(parcel.meta.get("done"), str):
                raise WireError("it has not come to the end: the sites run other software, or other settings")
            return str(parcel.meta["done"])[:64]

        return self.relay.ask(Phase.STEP, self._questions(self.number + 1), read, Budget())

    def _questions(self, number: int) -> dict[int, Parcel]:
        """One message for all: the number of the exchange, and what came of the one before."""
        before = self._told(number - 1) or Parcel()
        meta = {**before.meta, "agreement": self.agreement, "number": number}
        return dict.fromkeys(range(self.n_clients), Parcel(meta, before.tensors))


def follow(
    config: Settings, transport: Transport, names: Sequence[str], *, resume: bool = False, **hooks: Unpack[Hooks]
) -> Result:
    """Relay a run by totals, and follow it: the same program as at the sites, without data."""
    held = Path(config.run.folder) / run_name(config) / DOCUMENT
    before = json.loads(held.read_text()) if resume and held.is_file() else None
    if before is not None:
        config = with_seed(config, before["seed"])
    folder = held.parent if before is not None else choose_folder(config, resume)
    relay = Relay(transport, names, config.deploy.timeout, on_wait=hooks.get("on_wait"))

    def amend(record: dict[str, Any]) -> None:
        record["traffic"], relay.traffic = vars(relay.traffic), Traffic()

    with claimed(config, folder, resume) as folder:
        if config.deploy.trust == "server":
            schema = agree(*say_hello(transport, range(len(names)), config.deploy.timeout, model=config.model), names)
        else:
            schema = declared_schema(config)
        document = write_document(config, schema, names, folder.name)
        if before is None:
            agreement, seed = relay.begin(document, config.run.seed)
            before = {"document": document, "agreement": agreement, "seed": seed}
            write_atomically(folder / DOCUMENT, json.dumps(before))
            config = with_seed(config, seed)
        elif canonical(before["document"]) != canonical(document):
            raise FedtailError(f"{str(folder)!r} was agreed on with other settings or sites; start a new run")
        journal = Journal(folder / "exchanges")
        totals = RelayTotals(relay, before["agreement"], groups_of(config, len(names)), journal)
        seed, name = before["seed"], transport.name
        begun = folder.parent / config.deploy.after if config.deploy.after else None
        result, digest = run_document(
            document, seed, totals, {}, folder, settings=config, begun=begun, engine=name, amend=amend, **hooks
        )
        for client, found in totals.finish().items():
            if found != digest:
                log.warning("%s has come to another model than this server", names[client])
    return result


def with_seed(config: Settings, seed: int) -> Settings:
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
