"""What strangers and one greedy key throw at a router, each in a process of its own. See bench/edge.py."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc
from manylora_shared.address import parse_address
from manylora_shared.tenancy.identity import bearer

GENERATE = "/manylora.v1.InferenceService/Generate"
ADD_ADAPTER = "/manylora.v1.AdminService/AddAdapter"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
EMPTY_MESSAGES = b"\x0a\x00" * 1_900_000
BOMB = b"\x1a" + b"\xc0\xf7\xe7\x01" + EMPTY_MESSAGES  # chat (3), its length, its 1.9 M empty messages
CROWD = b"\x1a" + b"\xc0\x84\x3d" + b"\x0a\x00" * 500_000  # the same within a request's size: 500,000 messages
SMALL = b"\x0a\x02hi\x20\x10"  # text "hi", 16 tokens
NUM_HELD = 16_600
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


async def health(assault: Assault) -> None:
    watching = assault.held(4_000, lambda channel: channel.unary_stream(WATCH)(b""))
    checking = assault.loops(64, lambda channel: channel.unary_unary(CHECK)(b""))
    await asyncio.gather(watching, checking)


async def connections(assault: Assault) -> None:
    """Half a handshake on each."""
    await _half_open(assault, assault.address, b"PRI * HTTP/2.0\r\n")


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
    "calls": calls,
    "long-metadata": long_metadata,
    "unread": unread,
    "open-calls": open_calls,
    "uploads": uploads,
    "health": health,
    "connections": connections,
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
