"""A site's public key in the form in which Flower knows the site by it."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization


def public_key_bytes(path: Path) -> bytes:
    """Return the key in a ``site.pub`` as PEM."""
    key = serialization.load_ssh_public_key(path.read_bytes())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
