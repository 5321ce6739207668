"""`host:port` as text."""

from __future__ import annotations

import pytest
from manylora_shared.address import is_any_host, join_address, parse_address


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("a.b-c:65535", ("a.b-c", 65535))],
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed
    assert join_address(*parsed) == address


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "::1:80", "host:", "host:-1", "host:65536", "host:8o", "host:²"]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        parse_address(address)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0", "00.0", "0x0", "*", "", "::0", "::ffff:0.0.0.0"])
def test_all_of_a_machines_addresses(host: str) -> None:
    assert is_any_host(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.0", "x", "xx", "0x", "router", "0.0.0.1", "a.0"])
def test_one_address(host: str) -> None:
    assert not is_any_host(host)
