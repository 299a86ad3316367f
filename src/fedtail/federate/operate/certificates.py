"""Keys and certificates: a private CA, the server's TLS certificate, and one key pair per site."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.protocol.agreement import read_public_key, read_site_key

CA_DAYS, SERVER_DAYS = 3650, 825
PEM, OPENSSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
UNUSED = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")


@dataclass(frozen=True)
class Validity:
    """What ``doctor`` checks of a certificate."""

    ends: datetime.datetime
    hosts: tuple[str, ...]
    signed_by_ca: bool


def write_secret(path: Path, data: bytes) -> None:
    """Write a private key that nobody else can read, not even for a moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def make_ca(folder: Path, name: str) -> None:
    """Write ``ca.key`` and ``ca.crt``. The key signs server certificates and never leaves the server's folder."""
    _certify(folder, "ca", f"{name} CA", CA_DAYS)


def make_server_certificate(folder: Path, hosts: list[str]) -> None:
    """Write ``server.key`` and ``server.crt`` for the given host names and addresses, signed by the folder's CA."""
    _certify(folder, "server", hosts[0], SERVER_DAYS, hosts)


def _certify(folder: Path, file: str, name: str, days: int, hosts: list[str] | None = None) -> None:
    """Write a new key and its certificate: for hosts by the CA in the folder, without any that of the CA itself."""
    key = signer = ec.generate_private_key(ec.SECP384R1())
    subject = issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    if hosts:
        issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).subject
        loaded = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer = loaded
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys((*UNUSED, "decipher_only"), False) | dict.fromkeys(("key_cert_sign", "crl_sign"), not hosts)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # An hour of slack: sites whose clocks run behind must be able to connect at once.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None if hosts else 0), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=bool(hosts), **usage), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_secret(folder / f"{file}.key", private)
    (folder / f"{file}.crt").write_bytes(builder.sign(signer, hashes.SHA384()).public_bytes(PEM))


def make_site_key(folder: Path, name: str) -> None:
    """Write ``site.pub`` for ``site.key``, which is made where there is none: with them a site proves who it is. Only
    the public half is registered."""
    secret = folder / "site.key"
    if not secret.is_file():
        key = ec.generate_private_key(ec.SECP384R1())
        write_secret(secret, key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()))
    public = read_site_key(secret).public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)
    (folder / "site.pub").write_bytes(public + f" {name}\n".encode())


def public_key_bytes(path: Path) -> bytes:
    """Return the key in a ``site.pub`` as Flower knows the site by it: PEM."""
    return read_public_key(path).public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def key_matches(folder: Path) -> bool:
    """Return whether ``site.key`` and ``site.pub`` are a pair."""
    return read_site_key(folder / "site.key").public_key() == read_public_key(folder / "site.pub")


def renew_certificate(deployment: Deployment) -> str:
    """Renew the server's certificate for the same addresses; returns the day on which it ends."""
    server = deployment.server
    if not (server / "ca.key").is_file():
        raise FedtailError(f"{str(server / 'ca.key')!r} is missing; restore the CA's key to sign a certificate")
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost")
    with contextlib.suppress(FedtailError):  # it may be lost
        hosts = inspect_certificate(server / "server.crt", server / "ca.crt").hosts
    try:
        make_server_certificate(server, list(dict.fromkeys([deployment.public.rpartition(":")[0], *hosts])))
    except (OSError, ValueError, TypeError) as error:
        raise FedtailError(f"the CA in {str(server)!r} cannot sign: restore ca.key and ca.crt ({error})") from None
    return f"{inspect_certificate(server / 'server.crt', server / 'ca.crt').ends:%Y-%m-%d}"


def inspect_certificate(certificate: Path, ca: Path) -> Validity:
    """Read a server certificate and check its signature."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(ca.read_bytes())
    except (OSError, ValueError) as error:
        raise FedtailError(f"certificate {str(certificate)!r} or {str(ca)!r} cannot be read: {error}") from None
    signed = False
    with contextlib.suppress(InvalidSignature, ValueError, TypeError):
        leaf.verify_directly_issued_by(authority)
        signed = True
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [str(v) for kind in (x509.DNSName, x509.IPAddress) for v in names.get_values_for_type(kind)]
    return Validity(leaf.not_valid_after_utc, tuple(hosts), signed)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
