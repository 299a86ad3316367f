"""The job as one document that all sites sign before any of them answers anything.

1. Each site checks the document against its own policy, schema and list of sites, and makes an ``Offer``: a fresh key
   for the run and a commitment to a random number, signed together with the hash of the document.
2. Each site checks the offers of all sites: the same hash, every signature by the key of its own list. Only then does
   it reveal its number and seal a share of a common key for each of the others.
3. Each site checks the numbers against the commitments. The seed of the run is the hash of all of them, the common
   key that of all shares.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.keys import (
    Roster,
    is_signed,
    new_secret,
    pair_secret,
    public_half,
    seal,
    sign,
    unseal,
)
from fedtail.federate.protocol.limits import WireError
from fedtail.federate.protocol.masks import SEED, derive

LEAST = 3
"""Sites of a sum, at least: with two, each knows the other's numbers."""


class AgreementError(CodedError):
    """Sites have not agreed on the same thing; the message names whose word is missing or wrong."""

    def __init__(self, text: str) -> None:
        super().__init__("agreement", text)


def canonical(document: Mapping[str, Any]) -> bytes:
    """The one way to write a document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def hash_of(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(document)).hexdigest()


@dataclass(frozen=True)
class Offer:
    """A site's signed word on a document."""

    site: str
    document: str
    """Hash of the document."""
    key: str
    """Public half of its key for the run."""
    commitment: str
    """Hash of its random number."""
    roster: str
    """Hash of its list of sites."""
    signature: str = ""

    @property
    def statement(self) -> bytes:
        return canonical({**vars(self), "signature": "", "what": "fedtail agreement 1"})

    @classmethod
    def from_json(cls, told: Any) -> Offer:
        """``WireError`` for anything that is not an offer."""
        names = cls.__dataclass_fields__
        if not isinstance(told, dict) or set(told) != set(names) or not all(isinstance(v, str) for v in told.values()):
            raise WireError("an offer that cannot be read")
        return cls(**told)


def id_of(offers: Mapping[str, Offer]) -> str:
    """The name of an agreement: it differs with the document, the sites, their keys and their commitments."""
    return hash_of({name: vars(offer) for name, offer in offers.items()})


def plain_id(document: Mapping[str, Any], number: str) -> str:
    """The name of what a server that is trusted begins, under a random number of its own."""
    return hash_of({"document": document, "number": number})


def check_offers(roster: Roster, document: str, offers: Mapping[str, Offer]) -> None:
    """``AgreementError`` unless every site of the list has signed this document, and nobody else has."""
    if set(offers) != set(roster.names):
        other = sorted(set(offers) ^ set(roster.names))
        raise AgreementError(f"offers of other sites than sites.pub lists: {', '.join(other)}")
    for name, offer in offers.items():
        if offer.site != name or not is_signed(roster.key(name), offer.signature, offer.statement):
            raise AgreementError(f"the offer of {name!r} is not signed by its key in sites.pub")
        if offer.roster != roster.digest:
            raise AgreementError(f"{name!r} has another list of sites (sites.pub); compare fingerprints")
        if offer.document != document:
            raise AgreementError(f"{name!r} has signed another document")
    if len({offer.key for offer in offers.values()}) < len(offers):
        raise AgreementError("two sites offer the same key")


@dataclass
class Party:
    """One site's side of an agreement, from its offer on. All of it is kept on disk, by ``to_json``."""

    name: str
    document: dict[str, Any]
    secret: bytes = field(default_factory=new_secret)
    number: bytes = field(default_factory=lambda: os.urandom(SEED))
    """Its part of the seed."""
    share: bytes = field(default_factory=lambda: os.urandom(SEED))
    """Its part of the common key."""
    offers: dict[str, Offer] = field(default_factory=dict)
    seed: int = 0
    common: bytes = b""
    """The key that all sites have and the server has not; empty until the agreement stands."""

    def offer(self, key: ec.EllipticCurvePrivateKey, roster: Roster) -> Offer:
        """The signed word on the document."""
        commitment = hashlib.sha256(self.number).hexdigest()
        bare = Offer(self.name, hash_of(self.document), public_half(self.secret).hex(), commitment, roster.digest)
        return Offer(**{**vars(bare), "signature": sign(key, bare.statement)})

    @property
    def plain(self) -> bool:
        """Whether the server is trusted, so that nothing is signed or masked."""
        return bool(self.document.get("trust") == "server")

    @property
    def id(self) -> str:
        return plain_id(self.document, self.number.hex()) if self.plain else id_of(self.offers)

    def reveal(self, roster: Roster, offers: Mapping[str, Offer]) -> tuple[str, dict[str, str]]:
        """(this site's number, its share sealed for each other site), once every site has signed the same."""
        check_offers(roster, hash_of(self.document), offers)
        mine = offers[self.name]
        if mine.key != public_half(self.secret).hex() or (self.offers and dict(offers) != self.offers):
            raise AgreementError("offers for another agreement than this site has begun")
        self.offers = dict(offers)
        return self.number.hex(), {peer: seal(s, self.name, self.share) for peer, s in self.pairs().items()}

    def begin(self, numbers: Mapping[str, str], shares: Mapping[str, str]) -> None:
        """Take everybody's number and share; ``AgreementError`` unless they are those that were promised."""
        if set(numbers) != set(self.offers) or set(shares) != set(self.offers) - {self.name}:
            raise AgreementError("numbers or shares of other sites than have signed")
        for name, number in numbers.items():
            if hashlib.sha256(_bytes(number)).hexdigest() != self.offers[name].commitment:
                raise AgreementError(f"{name!r} has revealed another number than it promised")
        try:
            parts = {peer: unseal(secret, peer, shares[peer]) for peer, secret in self.pairs().items()}
        except ValueError as error:
            raise AgreementError(str(error)) from None
        parts[self.name] = self.share
        self.seed = seed_of(self.id, numbers)
        self.common = derive(bytes(SEED), "common", self.id, *(parts[name] for name in sorted(parts)))

    def pairs(self) -> dict[str, bytes]:
        """Other site -> the secret that this one shares with it."""
        others = {name: bytes.fromhex(o.key) for name, o in self.offers.items() if name != self.name}
        return {name: pair_secret(self.secret, key, self.id) for name, key in others.items()}

    def to_json(self) -> dict[str, Any]:
        hidden = {name: getattr(self, name).hex() for name in ("secret", "number", "share", "common")}
        offers = {name: vars(offer) for name, offer in self.offers.items()}
        return {"name": self.name, "document": self.document, "offers": offers, "seed": self.seed, **hidden}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Party:
        hidden = {name: bytes.fromhex(told[name]) for name in ("secret", "number", "share", "common")}
        offers = {name: Offer(**offer) for name, offer in told["offers"].items()}
        return cls(name=told["name"], document=told["document"], offers=offers, seed=told["seed"], **hidden)


def seed_of(agreement: str, numbers: Mapping[str, str]) -> int:
    """The seed of a run, which no site has chosen unless all have."""
    found = derive(bytes(SEED), "seed", agreement, *(_bytes(numbers[name]) for name in sorted(numbers)))
    return int.from_bytes(found[:6], "big")


def _bytes(told: object) -> bytes:
    try:
        return bytes.fromhex(str(told))
    except ValueError:
        raise AgreementError("a number that is not one") from None
