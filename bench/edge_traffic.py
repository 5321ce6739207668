"""What strangers and one greedy key throw at a router, each in a process of its own. See bench/edge.py."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import resource
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc
from manylora_shared.address import parse_address
from manylora_shared.tenancy.identity import bearer

GENERATE = "/manylora.v1.InferenceService/Generate"
ADD_ADAPTER = "/manylora.v1.AdminService/AddAdapter"
LIST_ADAPTERS = "/manylora.v1.AdminService/ListAdapters"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
EMPTY_MESSAGES = b"\x0a\x00" * 1_900_000
BOMB = b"\x1a" + b"\xc0\xf7\xe7\x01" + EMPTY_MESSAGES  # chat (3), its length, its 1.9 M empty messages
CROWD = b"\x1a" + b"\xc0\x84\x3d" + b"\x0a\x00" * 500_000  # the same within a request's size: 500,000 messages
SMALL = b"\x0a\x02hi\x20\x10"  # text "hi", 16 tokens
NUM_HELD = 16_600
NUM_HALF = 4_000
NUM_IDLE = 24_000
_CHANNELS = 8
_ERROR_PAUSE_S = 0.01

Outcomes = collections.Counter[str]
Metadata = tuple[tuple[str, str], ...]


class Assault:
    """One process's connections, and how its calls ended."""

    def __init__(self, address: str, http: str, key: str) -> None:
        self.address = address
        self.http = http
        self.key: Metadata = (*bearer(key).items(),)
        self.outcomes: Outcomes = collections.Counter()
        options = (("grpc.use_local_subchannel_pool", 1),)
        self.channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(_CHANNELS)]

    async def loops(self, count: int, once: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> None:
        """Closed loops."""

        async def loop(index: int) -> None:
            while True:
                try:
                    await once(self.channels[index % _CHANNELS])
                    self.outcomes["answered"] += 1
                except grpc.RpcError as e:
                    self.outcomes[e.code().name] += 1
                    await asyncio.sleep(_ERROR_PAUSE_S)

        await asyncio.gather(*(loop(index) for index in range(count)))

    async def held(self, count: int, opened: Callable[[grpc.aio.Channel], Any]) -> None:
        """Calls that are opened and never read, again and again where they ended."""
        calls: list[Any] = []
        while True:
            ended = [call for call in calls if call.done()]
            for call in ended:
                self.outcomes[(await call.code()).name] += 1
            calls = [call for call in calls if not call.done()]
            for index in range(min(200, count - len(calls))):
                calls.append(opened(self.channels[index % _CHANNELS]))
            await asyncio.sleep(0.02)


async def large_messages(assault: Assault) -> None:
    await assault.loops(32, lambda channel: channel.unary_stream(GENERATE)(BOMB).read())


async def large_messages_with_a_key(assault: Assault) -> None:
    await assault.loops(32, lambda channel: channel.unary_stream(GENERATE)(BOMB, metadata=assault.key).read())


async def crowded_messages(assault: Assault) -> None:
    await assault.loops(32, lambda channel: channel.unary_stream(GENERATE)(CROWD, metadata=assault.key).read())


async def calls(assault: Assault) -> None:
    await assault.loops(64, lambda channel: channel.unary_stream(GENERATE)(SMALL).read())


async def storm(assault: Assault) -> None:
    """As many calls without a key as come through, 500 at a time on each connection."""
    host, port = parse_address(assault.address)
    loop = asyncio.get_running_loop()
    headers = {":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "router", "te": "trailers"}
    block = _header_block({**headers, "content-type": "application/grpc"})

    async def opened() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, connection = await loop.create_connection(_Idle, host, port)
                sent = 0
                while not connection.ended.done() and sent < 1 << 24:
                    while sent - len(connection.reset) < 500:
                        connection.send(1, 5, 2 * sent + 1, block)
                        sent += 1
                    connection.moved.clear()
                    await connection.moved.wait()
                    assault.outcomes["refused"] += len(connection.reset) - connection.counted
                    connection.counted = len(connection.reset)

    await asyncio.gather(*(opened() for _ in range(_CHANNELS)))


async def long_metadata(assault: Assault) -> None:
    rng = random.Random(1)

    def once(channel: grpc.aio.Channel) -> Awaitable[Any]:
        name = f"Bearer {rng.getrandbits(4 * 14_000):x}"
        reading: Awaitable[Any] = channel.unary_stream(GENERATE)(SMALL, metadata=(("authorization", name),)).read()
        return reading

    await assault.loops(64, once)


async def unread(assault: Assault) -> None:
    await assault.held(NUM_HELD, lambda channel: channel.unary_stream(GENERATE)(SMALL))


async def open_calls(assault: Assault) -> None:
    metadata = (*assault.key, ("x-request-class", "batch"))
    await assault.held(NUM_HELD, lambda channel: channel.unary_stream(GENERATE)(SMALL, metadata=metadata))


async def uploads(assault: Assault) -> None:
    header = b"\x0a\x09" + b"\x12\x07trickle"  # header (1): its name (2)

    async def once(channel: grpc.aio.Channel) -> None:
        call = channel.stream_unary(ADD_ADAPTER)(metadata=assault.key)
        await call.write(header)
        await call

    await assault.loops(64, once)


async def admin_calls(assault: Assault) -> None:
    await assault.loops(64, lambda channel: channel.unary_unary(LIST_ADAPTERS)(b"", metadata=assault.key))


async def health(assault: Assault) -> None:
    watching = assault.held(4_000, lambda channel: channel.unary_stream(WATCH)(b""))
    checking = assault.loops(64, lambda channel: channel.unary_unary(CHECK)(b""))
    await asyncio.gather(watching, checking)


async def connections(assault: Assault) -> None:
    """Half a handshake on each."""
    await _half_open(assault, assault.address, b"PRI * HTTP/2.0\r\n")


async def idle_connections(assault: Assault) -> None:
    """More than a process has open files, whole, and kept alive."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = parse_address(assault.address)
    loop = asyncio.get_running_loop()

    async def opened() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, connection = await loop.create_connection(_Idle, host, port)
                await connection.ended
                assault.outcomes["cut off"] += 1
            await asyncio.sleep(_ERROR_PAUSE_S)

    await asyncio.gather(*(opened() for _ in range(min(NUM_IDLE, hard - 1_000))))


async def half_messages(assault: Assault) -> None:
    """One tenant's calls with all but the end of a message of 1 MiB."""
    host, port = parse_address(assault.address)
    loop = asyncio.get_running_loop()
    headers = {":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "router", "te": "trailers"}
    block = _header_block({**headers, "content-type": "application/grpc", **dict(assault.key)})
    begun = b"\0" + (1 << 20).to_bytes(4, "big") + b"\x0a\xf0\xff\x3f"
    chunks = [begun + b"x" * (16_384 - len(begun)), *([b"x" * 16_384] * 62)]

    async def opened() -> None:
        _, connection = await loop.create_connection(_Idle, host, port)
        for stream in range(1, 2 * NUM_HALF // _CHANNELS, 2):
            connection.send(1, 4, stream, block)  # its headers have ended
            for chunk in chunks:
                if not await connection.room(stream, len(chunk)):
                    assault.outcomes["refused" if stream in connection.reset else "stalled"] += 1
                    break
                connection.send(0, 0, stream, chunk)
            else:
                assault.outcomes["half sent"] += 1
        await connection.ended

    await asyncio.gather(*(opened() for _ in range(_CHANNELS)))


def _header_block(headers: dict[str, str]) -> bytes:
    """HPACK without tables (RFC 7541, 6.2.2); no value has 127 bytes."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )


class _Idle(asyncio.Protocol):
    """An HTTP/2 connection that answers what keeps it alive, and counts what it may send."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reset: set[int] = set()
        self._window = collections.Counter({0: 65_535})
        self._first_window = 65_535
        self.moved = asyncio.Event()
        self.counted = 0
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # type: ignore[attr-defined]
        self.send(4, 0, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self.moved.set()
        if not self.ended.done():
            self.ended.set_result(None)

    def send(self, kind: int, flags: int, stream: int, data: bytes = b"") -> None:
        self._transport.write(len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data)

    async def room(self, stream: int, size_bytes: int) -> bool:
        """Waits until so much may be sent, for a moment."""
        self._window.setdefault(stream, self._first_window)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while min(self._window[0], self._window[stream]) < size_bytes:
                    if stream in self.reset or self.ended.done():
                        return False
                    self.moved.clear()
                    await self.moved.wait()
                self._window[0] -= size_bytes
                self._window[stream] -= size_bytes
                return True
        return False

    def data_received(self, data: bytes) -> None:
        data = self._unread + data
        while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3], "big")):
            self._frame(data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end])
            data = data[end:]
        self._unread = data

    def _frame(self, kind: int, flags: int, stream: int, data: bytes) -> None:
        if kind == 6 and not flags & 1:  # a ping
            self.send(6, 1, 0, data)
        elif kind == 4 and not flags & 1:
            for at in range(0, len(data), 6):
                if data[at : at + 2] == b"\0\4":
                    self._first_window = int.from_bytes(data[at + 2 : at + 6], "big")
            self.send(4, 1, 0)
        elif kind == 8:
            self._window[stream] += int.from_bytes(data, "big")
            self.moved.set()
        elif kind == 3 or (kind == 1 and flags & 1):  # it was reset, or has its status
            self.reset.add(stream)
            self.moved.set()


async def http_connections(assault: Assault) -> None:
    await _half_open(assault, assault.http, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")


async def http_bodies(assault: Assault) -> None:
    host, port = parse_address(assault.http)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n"

    async def loop() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(head + b"[" * 1_000_000)
                status = (await reader.readline())[9:12].decode()
                assault.outcomes[status or "cut off"] += 1
                writer.transport.abort()
            await asyncio.sleep(_ERROR_PAUSE_S)

    await asyncio.gather(*(loop() for _ in range(32)))


async def _half_open(assault: Assault, address: str, first: bytes) -> None:
    host, port = parse_address(address)

    async def loop() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(first)
                while await reader.read(1 << 16):
                    pass
                assault.outcomes["cut off"] += 1
                writer.transport.abort()
            await asyncio.sleep(_ERROR_PAUSE_S)

    await asyncio.gather(*(loop() for _ in range(1_000)))


ASSAULTS: dict[str, Callable[[Assault], Awaitable[None]]] = {
    "large-messages": large_messages,
    "large-messages-with-a-key": large_messages_with_a_key,
    "crowded-messages": crowded_messages,
    "half-messages": half_messages,
    "calls": calls,
    "storm": storm,
    "long-metadata": long_metadata,
    "unread": unread,
    "open-calls": open_calls,
    "uploads": uploads,
    "admin-calls": admin_calls,
    "health": health,
    "connections": connections,
    "idle-connections": idle_connections,
    "http-connections": http_connections,
    "http-bodies": http_bodies,
}


def assault_process(name: str, address: str, http: str, key: str, pipe: Connection) -> None:
    """Goes on until something comes through the pipe; sends back how its calls ended."""
    os.nice(5)
    pipe.send(asyncio.run(_run(name, address, http, key, pipe)))


async def _run(name: str, address: str, http: str, key: str, pipe: Connection) -> dict[str, int]:
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    assault = Assault(address, http, key)
    running = asyncio.ensure_future(ASSAULTS[name](assault))
    stopped = asyncio.create_task(told.wait())
    await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()  # it ends by a bug alone
    running.cancel()
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    return dict(assault.outcomes)
