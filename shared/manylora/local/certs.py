"""A certificate authority for development and for one's own network, and a certificate of it for all services.

Owns a folder: ca.pem, ca.key, service.pem, service.key. Keys are readable by their owner alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA, CA_KEY, CERT, KEY = "ca.pem", "ca.key", "service.pem", "service.key"
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
_CA_DAYS, _CERT_DAYS = 3650, 365
_EARLIER = datetime.timedelta(hours=1)  # clocks differ


def make(folder: Path, hosts: Sequence[str], now: datetime.datetime) -> None:
    """A new certificate for these hosts and this machine's own, by the folder's authority, which is made where there is
    none. Files are replaced whole, so services that use them take the new ones. Raises OSError, or ValueError where
    what is there cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (folder / CA_KEY).exists():
        ca_key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        ca = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    else:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _authority(ca_key, now)
        _write(folder / CA_KEY, _key_pem(ca_key), 0o600)
        _write(folder / CA, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{folder / CA_KEY}: is no key of an elliptic curve")
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _service(key, list(dict.fromkeys([*OWN_HOSTS, *hosts])), ca, ca_key, now)
    # The key first: who reads between the two finds a pair that does not fit, and keeps what it has.
    _write(folder / KEY, _key_pem(key), 0o600)
    _write(folder / CERT, cert.public_bytes(serialization.Encoding.PEM), 0o644)


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "manylora certificate authority")])
    public = key.public_key()
    return (
        _builder(name, name, public, now, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _service(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "manylora service")])
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        _builder(name, ca.subject, key.public_key(), now, _CERT_DAYS)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    """Raises ValueError where it is no name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host.isascii() or not host or any(c.isspace() for c in host):
            raise ValueError(f"{host!r} is no host name") from None
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    draft.replace(path)
