"""Keys and certificates: a private CA, the server's TLS certificate, and one key pair per site."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtail.errors import FedtailError
from fedtail.federate.flower.keys import public_key_bytes

CA_DAYS, SERVER_DAYS = 3650, 825


@dataclass(frozen=True)
class Validity:
    """The facts that ``doctor`` checks about a certificate."""

    begins: datetime.datetime
    ends: datetime.datetime
    hosts: tuple[str, ...]
    signed_by_ca: bool


def write_secret(path: Path, data: bytes) -> None:
    """Write a private key that nobody else can read, not even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def make_ca(folder: Path, name: str) -> None:
    """Write ``ca.key`` and ``ca.crt``. The key signs server certificates and never leaves the server's folder."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} CA"[:64])])
    certificate = (
        _builder(subject, subject, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(folder: Path, hosts: list[str], ca: Path | None = None) -> None:
    """Write ``server.key`` and ``server.crt`` for the given host names and addresses, signed by the folder's CA."""
    ca = ca or folder
    authority = x509.load_pem_x509_certificate((ca / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((ca / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), critical=False)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA384())
    )
    for name in ("server.key", "server.crt"):
        (folder / name).unlink(missing_ok=True)
    write_secret(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_site_key(folder: Path, name: str) -> None:
    """Write ``site.key`` and ``site.pub``, with which a site proves who it is. Only the public half is registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_secret(folder / "site.key", private)
    (folder / "site.pub").write_bytes(public + f" {name}\n".encode())


def key_matches(folder: Path) -> bool:
    """Return whether ``site.key`` and ``site.pub`` are a pair."""
    private = serialization.load_ssh_private_key((folder / "site.key").read_bytes(), None)
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return public == public_key_bytes(folder / "site.pub")


def inspect_certificate(certificate: Path, ca: Path) -> Validity:
    """Read a server certificate and check its signature."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(ca.read_bytes())
    except (OSError, ValueError) as error:
        raise FedtailError(f"certificate {str(certificate)!r} or {str(ca)!r} cannot be read: {error}") from None
    try:
        leaf.verify_directly_issued_by(authority)
        signed = True
    except Exception:  # the library raises several kinds for "not signed by this one"
        signed = False
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [str(v) for v in names.get_values_for_type(x509.DNSName)]
    hosts += [str(v) for v in names.get_values_for_type(x509.IPAddress)]
    return Validity(leaf.not_valid_before_utc, leaf.not_valid_after_utc, tuple(hosts), signed)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # An hour of slack: sites whose clocks run behind must be able to connect at once.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    allowed = dict.fromkeys((*names, "decipher_only"), False)
    allowed |= dict.fromkeys(("key_cert_sign", "crl_sign"), sign_certificates)
    return x509.KeyUsage(digital_signature=not sign_certificates, **allowed)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
