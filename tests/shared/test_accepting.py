"""Calls that come by thousands at once are all taken, whatever the event loop does meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.shared.transport_echo import METHODS, echo_service, text

BURST = 2_000  # of one connection, and one acceptor: more than gRPC's own bound, by which it turns calls away at random
BUSY_S = 1.5


def burst(address: str) -> list[str]:
    """The first answer of each call, or its status."""
    channel = grpc.insecure_channel(address)
    call = channel.unary_stream(METHODS["ServerStream"].path, response_deserializer=bytes.decode)
    calls = [call(text("x").SerializeToString()) for _ in range(BURST)]
    told = []
    for each in calls:
        try:
            told.append(next(each))
        except grpc.RpcError as e:
            told.append(e.code().name)
    channel.close()
    return told


@asynccontextmanager
async def served(handler: Any) -> AsyncIterator[str]:
    service = replace(echo_service(ServerStream=handler), crowded=["ServerStream"])
    server = await GrpcTransport().serve("127.0.0.1:0", [service])
    try:
        yield server.address
    finally:
        await server.stop(0)


async def test_a_burst_that_waits_for_the_event_loop_is_taken_whole() -> None:
    told: list[str] = []
    came = asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        came.set()
        yield text(request.text)

    async with served(handler) as address:
        client = threading.Thread(target=lambda: told.extend(burst(address)))
        client.start()
        await came.wait()
        time.sleep(BUSY_S)  # noqa: ASYNC251 - the event loop takes no call
        await asyncio.to_thread(client.join)
    assert told == ["\n\x01x"] * BURST
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("calls of")]


async def test_a_call_that_is_left_cancels_its_handler() -> None:
    ended = asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text("first")
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with served(handler) as address:
        channel = GrpcTransport().connect(address)
        streams = [channel.stream(METHODS["ServerStream"], text("")) for _ in range(20)]
        for stream in streams:
            assert (await stream.read()).text == "first"
            ended.clear()
            stream.cancel()
            async with asyncio.timeout(10):
                await ended.wait()
        await channel.close()
