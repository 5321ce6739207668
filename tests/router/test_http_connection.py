"""Connections that are slow, silent or too long."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_fakes import http_front
from manylora_router.front.http import connection
from router_fakes import until


async def test_half_a_header_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.1)
    async with http_front() as front:
        for begun in (b"", b"GET /health HTTP/1.1\r\nhost:"):
            assert await front.raw(begun, within_s=2.0) == b""
        # The time of the headers does not count for a second request's.
        both = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        host, _, port = front.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(both)
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.15)
        writer.close()


@pytest.mark.parametrize("whole", [False, True])
async def test_long_headers_are_refused(whole: bool) -> None:
    async with http_front() as front:
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * (connection.MAX_HEADER_BYTES + 1)
        answer = await front.raw(head + (b"\r\n\r\n" if whole else b""))
        assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"2\r\n{}\r\n0\r\n", b"x-more: " + b"a" * 500 + b"\r\n"),
        (b"2\r\n{}\r\n0\r\n", b"a"),
        (b"2\r\n{}\r\n1;x=", b"a" * 500),
    ],
)
async def test_trailers_and_extensions_without_an_end_are_cut_off(begun: bytes, more: bytes, with_key: bool) -> None:
    """They were kept, as long as the connection stood: a stranger's five seconds were half a gigabyte."""
    async with http_front() as front:
        host, _, port = front.server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        authorization = f"authorization: Bearer {front.key}\r\n" if with_key else ""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{authorization}transfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode() + begun)
        with pytest.raises(ConnectionError):
            await _send(writer, more * 100, 16 << 20)
        writer.close()
        with pytest.raises(ConnectionError):
            await writer.wait_closed()


async def test_requests_behind_one_another_are_bounded() -> None:
    """A stranger's connection that sent thousands, and read no answer, took twenty megabytes."""
    one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    last = one.replace(b"host: x", b"connection: close")
    async with http_front() as front:
        assert (await front.raw(one * connection.MAX_PIPELINED + last)).count(
            b" 200 OK"
        ) == connection.MAX_PIPELINED + 1
        assert (await front.raw(one * 200 + last)).count(b" 200 OK") == 0


async def _send(writer: asyncio.StreamWriter, data: bytes, size_bytes: int) -> None:
    for _ in range(size_bytes // len(data)):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)


async def test_a_body_in_small_chunks_is_a_body() -> None:
    async with http_front() as front:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {front.key}\r\nconnection: close\r\n"
        body = b'{"model": "tiny", "max_tokens": 1, "prompt": "ab", "user": "' + b"a" * 40_000 + b'"}'
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        whole = head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\nx-trailer: 1\r\n\r\n"
        assert (await front.raw(whole)).startswith(b"HTTP/1.1 200")


async def test_garbage_is_refused() -> None:
    async with http_front() as front:
        for data in (
            b"\0\1\2\3\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET \xff HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
        ):
            answer = await front.raw(data)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert "gRPC has a port of its own" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(connection, "KEPT_CONNECTIONS", 0)
    whole = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with http_front() as front:
        host, _, port = front.server.address.rpartition(":")
        _, first = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.01)
        assert await front.raw(whole) == b""
        first.close()
        await asyncio.sleep(0.01)
        assert (await front.raw(whole)).startswith(b"HTTP/1.1 200")


class Held:
    """As much of a connection as is looked at."""

    def __init__(self, owner: str, made_at: float) -> None:
        self.owner = owner
        self.made_at = made_at

    def __repr__(self) -> str:
        return f"{self.owner}{self.made_at:g}"


def test_who_has_too_many_is_cut_off() -> None:
    strangers = [Held("", at) for at in (3.0, 1.0, 2.0, 9.9)]
    owned = [Held(owner, at) for owner, at in [("a", 1.0), ("a", 3.0), ("a", 2.0), ("b", 1.0)]]

    def cut(capacity: int, max_strangers: int) -> str:
        found = connection.beyond([*owned, *strangers], capacity, 10.0, max_strangers=max_strangers)  # type: ignore[list-item]
        return " ".join(map(str, found))

    assert cut(100, 4) == ""
    assert cut(100, 2) == "1 2", "the oldest of strangers"
    assert cut(100, 0) == "1 2 3", "but none that has just come"
    assert cut(4 + 3, 4) == "a3", "the newest of whom has more than its part"
    assert cut(4 + 2, 4) == "a2 a3"


async def test_a_connection_is_of_whose_key_came_over_it() -> None:
    async with http_front() as front, front.openai() as client:
        assert front.server._server is not None
        connections = front.server._server.server_state.connections
        await client.models.list()
        assert [getattr(each, "owner", None) for each in connections] == ["tenant acme"]
        for each in connections:
            each.made_at = -1.0  # type: ignore[union-attr]
            each.owner = ""  # type: ignore[union-attr]
        monkey = pytest.MonkeyPatch()
        monkey.setattr(connection.beyond, "__kwdefaults__", {"max_strangers": 0})
        try:
            await until(lambda: not connections)
        finally:
            monkey.undo()
