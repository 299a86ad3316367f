"""Keys of sites: the long-lived one that the other sites know it by, and fresh ones for every run.

``sites.pub`` in a site's folder lists the public keys of all sites, one line each as in ``site.pub``. It comes from
people who have compared fingerprints, not from the server: a key that is not on a site's own list does not exist.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedtail.errors import FedtailError
from fedtail.federate.protocol.masks import SEED, derive

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
    for line in path.read_text().splitlines():
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
    """A site's long-lived key."""
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedtailError(f"{str(path)!r} has the wrong key type; create one with `fedtail site keys`")
    return key


def sign(key: ec.EllipticCurvePrivateKey, statement: bytes) -> str:
    return key.sign(statement, SIGNATURE).hex()


def is_signed(key: ec.EllipticCurvePublicKey, signature: str, statement: bytes) -> bool:
    try:
        key.verify(bytes.fromhex(signature), statement, SIGNATURE)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_secret() -> bytes:
    """A private key for one run."""
    return X25519PrivateKey.generate().private_bytes_raw()


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
