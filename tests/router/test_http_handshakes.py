"""TLS that is begun and not ended, at the port of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from manylora.local import certs
from manylora_router.front.http import connection, handshakes
from manylora_router.front.http.server import HttpServer
from manylora_shared.transport.tls import Tls, TlsFiles
from router_fakes import until

_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
_WHOLE = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Answering:
    """As much of Routes as a server needs."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[HttpServer]:
    certs.make(folder, [], datetime.datetime.now(datetime.UTC))
    server = HttpServer(Answering(), Tls(TlsFiles(folder / certs.CERT, folder / certs.KEY)))  # type: ignore[arg-type]
    await server.start("127.0.0.1:0")
    try:
        yield server
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def begun(server: HttpServer, *sent: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """A connection for each."""
    host, _, port = server.address.rpartition(":")
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for data in sent:
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.push_async_callback(closed, writer)
            writer.write(data)
            readers.append(reader)
        yield readers


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def answer(server: HttpServer) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = server.address.rpartition(":")
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(_WHOLE)
            found = await reader.read()
            await closed(writer)
            return found
    except OSError:
        return b""


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    return True


async def test_who_ends_the_handshake_is_served_beside_those_who_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with (
        serving(tmp_path) as server,
        begun(server, b"", _HELLO, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096) as silent,
    ):
        assert b"https" in await answer(server)
        assert all([await is_cut(reader) for reader in silent])
        await until(lambda: not server._places.num_held)
        assert not list(server._handshakes or ())


async def test_handshakes_are_bounded_by_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(connection, "KEPT_CONNECTIONS", 0)
    async with serving(tmp_path) as server:
        async with begun(server, *[_HELLO] * 4):
            await until(lambda: server._places.num_held == 4)
            async with begun(server, _HELLO) as more:
                assert await is_cut(more[0])
            assert await answer(server) == b""
        await until(lambda: not server._places.num_held)
        assert (await answer(server)).startswith(b"HTTP/1.1 200")


async def test_of_those_under_way_too_many_are_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut off like connections without a key, the oldest first."""
    monkeypatch.setattr(connection.beyond, "__kwdefaults__", {"max_strangers": 2})
    async with serving(tmp_path) as server, begun(server, *[_HELLO] * 5) as readers:
        assert all([await is_cut(reader) for reader in readers[:3]])
        assert server._places.num_held == 2


async def test_who_speaks_plain_http_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        async with begun(server, _WHOLE, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 4096) as (http, grpc, nothing):
            told = await http.read()
            assert told.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"this port speaks HTTPS" in told
            assert (await grpc.read()).startswith(b"HTTP/1.1 400")
            assert await is_cut(nothing)
        assert b"https" in await answer(server)


async def test_a_server_that_stops_ends_them(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with serving(tmp_path) as server:
            (reader,) = await stack.enter_async_context(begun(server, _HELLO))
            await until(lambda: server._places.num_held == 1)
        assert await is_cut(reader)
        assert server._places.num_held == 0
