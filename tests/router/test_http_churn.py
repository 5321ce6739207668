"""Clients that come and go in every way: nothing of them is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct

import pytest
from http_fakes import Front, http_front, request_bytes
from router_fakes import say, until

WAYS = (
    "whole",
    "stream",
    "half header",
    "half body",
    "leaves",
    "resets",
    "two at once",
    "garbage",
    "wrong key",
    "silent",
)


async def client(front: Front, rng: random.Random) -> None:
    way = rng.choice(WAYS)
    body = json.dumps({"prompt": ["hi"] * rng.choice([1, 1, 3]), "stream": way != "whole", "max_tokens": 60}).encode()
    data = request_bytes("/v1/completions", body, front.key if way != "wrong key" else "mlk-nobody")
    host, _, port = front.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        if way in ("half header", "half body"):
            writer.write(data[: 40 if way == "half header" else -5])
            await asyncio.sleep(rng.uniform(0, 0.05))
        elif way == "garbage":
            writer.write(rng.randbytes(200) + b"\r\n\r\n")
            await reader.read()
        elif way != "silent":
            writer.write(data * (2 if way == "two at once" else 1))
            if way in ("leaves", "resets"):
                await asyncio.wait([asyncio.ensure_future(reader.read(100))], timeout=rng.uniform(0, 0.1))
            else:
                for _ in range(2 if way == "two at once" else 1):
                    end = b"0\r\n\r\n" if way in ("stream", "two at once") else b"}"
                    await reader.readuntil(end)
        if way == "resets":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        writer.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_left_of_who_has_gone(seed: int) -> None:
    rng = random.Random(seed)
    async with http_front(say("x" * 60, per_frame=3, pause_s=0.002)) as front:
        for _ in range(3):
            await asyncio.gather(*(client(front, rng) for _ in range(40)))
        server = front.server._server
        assert server is not None
        await until(lambda: not server.server_state.connections and not front.server._routes.running)
        await front.cluster.at_rest()
        assert front.server._routes._room.held_bytes == 0
        assert front.server._places.num_held == 0
        counters = front.cluster.app.calls.counters
        assert counters.received == counters.completed + counters.cancelled + counters.rejected
        assert min(counters.completed, counters.cancelled) > 5
