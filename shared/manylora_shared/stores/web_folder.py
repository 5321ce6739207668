"""Files below an https address that somebody named whom nobody has to trust. Blocks.

A name is resolved once, and that address is dialled: no second answer of a name server leads elsewhere.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from urllib.parse import urljoin, urlsplit

from manylora_shared.errors import InvalidRequest, ServiceUnavailable

MAX_REDIRECTS = 5
TIMEOUT_S = 30.0  # of a wait for the next bytes
_READ_BYTES = 1 << 20
_RETRY_S = 1.0
_FIELD = "source"
# Addresses that hold another, which may be a private one.
_TRANSLATED = tuple(ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))


def is_public(address: str) -> bool:
    """Of an IP address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if any(found in network for network in _TRANSLATED):
            return False
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
    return found.is_global and not found.is_multicast


class WebFolder:
    """base: an address that ends with '/'. is_trusted: an operator chose it: a private network, or plain http.

    A redirect never leads from there to another private host, and the token stays with the first.
    """

    def __init__(self, base: str, *, token: str = "", is_trusted: bool = False) -> None:
        self._base = base
        self._token = token
        self._is_trusted = is_trusted
        self._connection: http.client.HTTPConnection | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._reading = threading.Lock()
        self._is_closed = False

    def open(self, name: str) -> tuple[int | None, Iterator[bytes]] | None:
        """(size where it is told, content); None: there is none. Raises InvalidRequest, ServiceUnavailable."""
        with self._alone():
            try:
                return self._open(name)
            except BaseException:
                self._drop()
                raise

    def close(self) -> None:
        """From any thread, for good: ends a read under way."""
        self._is_closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._drop_unread()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._reading:
                yield
        finally:
            if self._is_closed:
                self._drop_unread()

    def _drop_unread(self) -> None:
        if self._reading.acquire(blocking=False):  # else who reads drops it behind its read, which ends now
            try:
                self._drop()
            finally:
                self._reading.release()

    def _drop(self) -> None:
        if self._answer is not None:
            self._answer.close()
        if self._connection is not None:
            self._connection.close()
        self._answer = self._connection = None

    def _open(self, name: str) -> tuple[int | None, Iterator[bytes]] | None:
        url = self._base + name
        for _ in range(MAX_REDIRECTS + 1):
            self._drop()
            try:
                answer = self._answer = self._get(url)
            except http.client.InvalidURL as error:
                raise InvalidRequest.of(_FIELD, "leads to what is no address") from error
            except (OSError, http.client.HTTPException) as error:
                raise ServiceUnavailable(f"{_FIELD}: cannot be reached now", retry_after_s=_RETRY_S) from error
            except ValueError as error:  # of a port or a bracket that is none, of letters that no request line has
                raise InvalidRequest.of(_FIELD, "leads to what is no address") from error
            if answer.status in (301, 302, 303, 307, 308):
                url = _joined(url, answer.headers.get("location", ""))
                continue
            if answer.status in (404, 410):
                return None
            if answer.status in (401, 403):
                raise InvalidRequest.of(_FIELD, f"its server refuses {name} (HTTP {answer.status})")
            if answer.status != 200:
                raise ServiceUnavailable(f"{_FIELD}: its server answers HTTP {answer.status}", retry_after_s=_RETRY_S)
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise InvalidRequest.of(_FIELD, f"its server sends {name} compressed")
            return answer.length, self._content(answer, name)
        raise InvalidRequest.of(_FIELD, f"leads to more than {MAX_REDIRECTS} redirects")

    def _get(self, url: str) -> http.client.HTTPResponse:
        parts, first = urlsplit(url), urlsplit(self._base)
        is_first = (parts.scheme, parts.netloc) == (first.scheme, first.netloc)
        is_trusted = self._is_trusted and is_first
        if parts.scheme != "https" and not (is_trusted and parts.scheme == "http"):
            raise InvalidRequest.of(_FIELD, "leads to an address that is not https")
        if parts.hostname is None or parts.username is not None:
            raise InvalidRequest.of(_FIELD, "leads to an address without a host, or with a user")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        plain = _dial(parts.hostname, port, is_trusted=is_trusted)
        try:
            if parts.scheme == "https":
                plain = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)
        except BaseException:
            plain.close()
            raise
        connection = self._connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = plain
        headers = {"accept-encoding": "identity", "user-agent": "manylora"}
        if self._token and is_first:
            headers["authorization"] = f"Bearer {self._token}"
        connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
        return connection.getresponse()

    def _content(self, answer: http.client.HTTPResponse, name: str) -> Iterator[bytes]:
        size_bytes, read_bytes = answer.length, 0
        while part := self._read(answer, name):
            read_bytes += len(part)
            yield part
        if size_bytes is not None and read_bytes != size_bytes:
            raise ServiceUnavailable(
                f"{_FIELD}: {name} broke off after {read_bytes} of {size_bytes} bytes", retry_after_s=_RETRY_S
            )

    def _read(self, answer: http.client.HTTPResponse, name: str) -> bytes:
        with self._alone():
            try:
                return answer.read1(_READ_BYTES)
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._drop()
                raise ServiceUnavailable(f"{_FIELD}: {name} broke off", retry_after_s=_RETRY_S) from error


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise InvalidRequest.of(_FIELD, "leads to what is no address") from error


def _dial(host: str, port: int, *, is_trusted: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServiceUnavailable(f"{_FIELD}: its host is not known", retry_after_s=_RETRY_S) from error
    addresses = [str(address[0]) for *_, address in found]
    if not is_trusted and not all(is_public(address) for address in addresses):
        # what the name stands for is not told: it would map the network
        raise InvalidRequest.of(_FIELD, "leads to a host that is not on the public internet")
    return socket.create_connection((addresses[0], port), timeout=TIMEOUT_S)
