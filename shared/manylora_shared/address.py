"""`host:port` as text. Pure; owns nothing."""

from __future__ import annotations

import ipaddress
import re

_ANY_HOST = re.compile(r"(0x)?0+(\.(0x)?0+)*|\*|")  # what systems take for 0.0.0.0


def parse_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[ipv6]:port`. Raises ValueError, naming the address."""
    host, separator, port_text = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or (":" in host and not bracketed):
        raise ValueError(f"address {address!r}: host:port is expected")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"address {address!r}: the port must be a number from 0 to 65535")
    return (host[1:-1] if bracketed else host), int(port_text)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any_host(host: str) -> bool:
    """Whether it stands for all of a machine's addresses (`0.0.0.0`, `[::]` and their other spellings)."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _ANY_HOST.fullmatch(host) is not None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
