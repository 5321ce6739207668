"""The development authority: what it signs, who may read its keys, and a second certificate by the same."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from manylora.local import certs

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def test_keys_are_their_owners_and_names_are_in_the_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    certs.make(folder, ["worker-1.internal", "10.0.0.5", "localhost"], NOW)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {certs.CA: 0o644, certs.CA_KEY: 0o600, certs.CERT: 0o644, certs.KEY: 0o600}
    cert = x509.load_pem_x509_certificate((folder / certs.CERT).read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "worker-1.internal"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.5"]


def test_a_second_certificate_is_by_the_same_authority(tmp_path: Path) -> None:
    certs.make(tmp_path, [], NOW)
    authority, first = (tmp_path / certs.CA).read_bytes(), (tmp_path / certs.CERT).read_bytes()
    certs.make(tmp_path, [], NOW)
    assert (tmp_path / certs.CA).read_bytes() == authority
    assert (tmp_path / certs.CERT).read_bytes() != first
    ca = x509.load_pem_x509_certificate(authority)
    x509.load_pem_x509_certificate((tmp_path / certs.CERT).read_bytes()).verify_directly_issued_by(ca)
    ssl.create_default_context(cafile=str(tmp_path / certs.CA))


def test_what_is_no_name_or_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a b' is no host name"):
        certs.make(tmp_path / "a", ["a b"], NOW)
    certs.make(tmp_path / "b", [], NOW)
    (tmp_path / "b" / certs.CA_KEY).write_text("no key")
    with pytest.raises(ValueError):  # noqa: PT011 - the library's words
        certs.make(tmp_path / "b", [], NOW)
