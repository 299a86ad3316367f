"""Keys behind masked sums: a fresh one per site and run, signed with the key that the other sites have on their list.

``sites.pub`` in a site's folder is that list: the public half of every site's long-lived key, one line each as in
``site.pub``. It comes to a site with its folder, not from the server: a server that puts in a key of its own finds it
refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedtail.core.masks import derive
from fedtail.errors import FedtailError

SIGNATURE = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Roster:
    """Who may be a member of a sum."""

    keys: dict[str, ec.EllipticCurvePublicKey]
    digest: str
    """The same at two sites that have the same list."""


def read_roster(path: Path) -> Roster:
    """The list in a ``sites.pub``; one clear line if it cannot be read."""
    keys, lines = {}, []
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
        if not isinstance(key, ec.EllipticCurvePublicKey) or name in keys:
            raise FedtailError(f"{str(path)!r}: {name!r} is listed twice, or its key has the wrong type")
        keys[name] = key
        lines.append(f"{kind} {data} {name}")
    return Roster(keys, hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32])


def read_site_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's long-lived key."""
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedtailError(f"{str(path)!r} has the wrong key type; create one with `fedtail deploy renew`")
    return key


def new_secret() -> bytes:
    """A private key for the sums of one run."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_half(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def shared_secret(secret: bytes, other: bytes) -> bytes:
    """What both ends of a pair compute, and nobody else."""
    mine = public_half(secret)
    agreed = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    return derive(agreed, "pair", *sorted([mine, other]))


def sign(key: ec.EllipticCurvePrivateKey, run: str, roster: str, name: str, public: bytes) -> bytes:
    """The site's word that this is its key for the run."""
    return key.sign(_statement(run, roster, name, public), SIGNATURE)


def is_signed(
    key: ec.EllipticCurvePublicKey, signature: bytes, run: str, roster: str, name: str, public: bytes
) -> bool:
    try:
        key.verify(signature, _statement(run, roster, name, public), SIGNATURE)
    except InvalidSignature:
        return False
    return True


def _statement(run: str, roster: str, name: str, public: bytes) -> bytes:
    return json.dumps(["fedtail masked sums", 1, run, roster, name, public.hex()]).encode()
