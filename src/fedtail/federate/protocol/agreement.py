"""The job as one document that all sites sign before any of them answers anything.

1. Each site checks the document against its own policy, schema and list of sites, and makes an ``Offer``: a fresh key
   for the run and a commitment to a random number, signed together with the hash of the document.
2. Each site checks the offers of all sites: the same hash, every signature by the key of its own list. Only then does
   it reveal its number and seal a share of a common key for each of the others.
3. Each site checks the numbers against the commitments. The seed of the run is the hash of all of them, the common
   key that of all shares.

``sites.pub`` in a site's folder lists the public keys of all sites, one line each as in ``site.pub``. It comes from
people who have compared fingerprints, not from the server: a key that is not on a site's own list does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedtail.errors import FedtailError
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.limits import WireError
from fedtail.federate.protocol.masks import SEED, derive

LEAST = 3
"""Sites of a sum, at least: with two, each knows the other's numbers."""


class AgreementError(CodedError):
    """Sites have not agreed on the same thing; the message names whose word is missing or wrong."""

    def __init__(self, text: str) -> None:
        super().__init__("agreement", text)


# -- keys: the long-lived one that the other sites know a site by, and fresh ones for every run ---------------------

SIGNATURE = ec.ECDSA(hashes.SHA384())
NONCE = bytes(12)
"""Every sealing key seals one message."""


@dataclass(frozen=True)
class Roster:
    """The sites of a federation, as one of them lists them."""

    lines: dict[str, str]
    """Site -> its public key, as in ``site.pub`` but for the name."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.lines))

    def key(self, name: str) -> ec.EllipticCurvePublicKey:
        key = serialization.load_ssh_public_key(self.lines[name].encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return key

    @property
    def digest(self) -> str:
        """The same at two sites that have the same list."""
        return hashlib.sha256(repr(sorted(self.lines.items())).encode()).hexdigest()[:32]

    def fingerprints(self) -> dict[str, str]:
        """Site -> what people compare: 32 hexadecimal digits."""
        return {name: hashlib.sha256(self.lines[name].encode()).hexdigest()[:32] for name in self.names}


def read_roster(path: Path) -> Roster:
    """The list in a ``sites.pub``; one clear line if it cannot be read."""
    lines: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            kind, data, name = line.split(maxsplit=2)
            key = serialization.load_ssh_public_key(f"{kind} {data}".encode())
        except ValueError:
            raise FedtailError(
                f"{str(path)!r} has a line that is not a public key with a name: {line[:40]!r}"
            ) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or name in lines or f"{kind} {data}" in lines.values():
            raise FedtailError(f"{str(path)!r}: {name!r} is listed twice, or its key has the wrong type")
        lines[name] = f"{kind} {data}"
    return Roster(lines)


def read_site_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's long-lived key; one clear line if it cannot be read."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    except (ValueError, TypeError, UnsupportedAlgorithm):  # no key, or one under a passphrase
        pass
    told = "restore it without a passphrase, or make another with `fedtail site keys --new`"
    raise FedtailError(f"{str(path)!r} is no key that `fedtail site keys` has made; {told}")


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The key in a ``site.pub``; one clear line if there is none."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key
    except (ValueError, UnsupportedAlgorithm):
        pass
    raise FedtailError(f"{str(path)!r} is not a site's public key; `fedtail site keys` writes it at the site")


def is_signed(key: ec.EllipticCurvePublicKey, signature: str, statement: bytes) -> bool:
    try:
        key.verify(bytes.fromhex(signature), statement, SIGNATURE)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_half(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def pair_secret(secret: bytes, other: bytes, agreement: str) -> bytes:
    """What both ends of a pair compute for one agreement, and nobody else can."""
    agreed = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    both = b"".join(sorted([public_half(secret), other]))
    return HKDF(hashes.SHA256(), SEED, agreement.encode(), b"fedtail pair" + both).derive(agreed)


def seal(secret: bytes, sender: str, data: bytes) -> str:
    """Data from one end of a pair to the other, once for each pair and sender."""
    return ChaCha20Poly1305(derive(secret, "seal", sender)).encrypt(NONCE, data, None).hex()


def unseal(secret: bytes, sender: str, sealed: str) -> bytes:
    """Inverse of ``seal``; ``ValueError`` for anything else."""
    try:
        return ChaCha20Poly1305(derive(secret, "seal", sender)).decrypt(NONCE, bytes.fromhex(sealed), None)
    except InvalidTag:
        raise ValueError("a sealed message was altered, or is for somebody else") from None


# -- documents and offers --------------------------------------------------------------------------------------------


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
    if len({_bytes(offer.key) for offer in offers.values()}) < len(offers):
        raise AgreementError("two sites offer the same key")


@dataclass
class Party:
    """One site's side of an agreement, from its offer on. All of it is kept on disk, by ``to_json``."""

    name: str
    document: dict[str, Any]
    secret: bytes = field(default_factory=lambda: X25519PrivateKey.generate().private_bytes_raw())
    """Private half of its key for the run."""
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
        return Offer(**{**vars(bare), "signature": key.sign(bare.statement, SIGNATURE).hex()})

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
        if not self.offers or set(numbers) != set(self.offers) or set(shares) != set(self.offers) - {self.name}:
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
