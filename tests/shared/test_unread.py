"""Who does not read what it asked for: its call's handler ends, and its connection where such calls are too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
from manylora_shared.errors import Code, ManyloraError, RpcError, SlowReader
from manylora_shared.transport import unread
from manylora_shared.transport.base import Service
from manylora_shared.transport.connections import Connections
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_shared.transport.places import Places
from manylora_shared.transport.unread import Unread

from tests.shared.transport_echo import METHODS, echo_service, text

BEYOND_THE_WINDOW = "x" * (3 << 20)


class Held:
    owner = "acme"

    def __init__(self, gate: OpenGate) -> None:
        self.gate = gate
        gate.places.enter(self.owner)

    def slow(self) -> Any:
        return lambda: None

    async def before_parsing(self, size_bytes: int) -> None:
        pass

    def release(self) -> None:
        self.gate.places.leave(self.owner)
        self.gate.left += 1
        self.gate.changed.set()


class OpenGate:
    max_message_bytes = 1 << 20

    def __init__(self) -> None:
        self.places = Places(64, kept=8)
        self.came = self.left = 0
        self.changed = asyncio.Event()

    async def until(self, *, came: int = 0, left: int = 0) -> None:
        async with asyncio.timeout(30):
            while self.came < came or self.left < left:
                await self.changed.wait()
                self.changed.clear()

    async def before_entering(self, call: Any) -> Any:
        return self.enter

    def enter(self) -> Held:
        self.came += 1
        self.changed.set()
        return Held(self)

    async def before_refusal(self, call: Any, refusal: ManyloraError) -> None:
        pass


async def endless(request: Any, call: Any) -> AsyncIterator[Any]:
    while True:
        yield text(BEYOND_THE_WINDOW)


async def large(request: Any, call: Any) -> Any:
    return text(BEYOND_THE_WINDOW)


async def drained(stream: Any) -> None:
    while await stream.read() is not None:
        pass


@pytest.mark.parametrize("method", ["ServerStream", "Unary"])
async def test_an_answer_that_nobody_reads_holds_no_place(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(unread, "UNREAD_S", 0.2)
    gate, echo = OpenGate(), echo_service(ServerStream=endless, Unary=large)
    server = await GrpcTransport().serve("127.0.0.1:0", [Service(echo.descriptor, echo.handlers, gate=gate)])
    channel = GrpcTransport().connect(server.address)
    stream = channel.stream(METHODS["ServerStream"], text(""))  # it fills the connection's window
    await gate.until(came=1)
    call = asyncio.create_task(channel.call(METHODS["Unary"], text(""))) if method == "Unary" else None
    await gate.until(left=2 if call is not None else 1)
    assert not gate.places.num_held
    with pytest.raises(RpcError, match=r"was not read for 0\.2 seconds") as caught:
        await drained(stream)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    if call is not None:
        await asyncio.gather(call, return_exceptions=True)
    await channel.close()
    await server.stop(0)


class Cuts(Connections):
    def __init__(self) -> None:
        super().__init__(capacity=8)
        self.cuts: list[str] = []

    def cut(self, peer: str) -> None:
        self.cuts.append(peer)


def test_a_connection_with_too_many_ends_that_nobody_reads_is_cut_off_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread, "MAX_UNREAD_ENDS", 16)
    monkeypatch.setattr(unread, "_KEPT", 8)
    found, connections = Unread(), Cuts()
    connections.vouch("greedy's", "greedy")
    with ExitStack() as ends:
        for _ in range(16):
            ends.enter_context(found.end("greedy's", connections))
        assert set(connections.cuts) == {"greedy's"}
        ends.enter_context(found.end("another's", connections))
        assert "another's" not in connections.cuts
    connections.cuts.clear()
    with found.end("greedy's", connections):
        assert not connections.cuts


async def test_who_leaves_and_who_reads_in_time_is_no_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Unread()
    going_on = asyncio.Event()

    async def write(data: bytes) -> None:
        await going_on.wait()

    async def written() -> str:
        task = asyncio.current_task()
        assert task is not None
        try:
            await found.write(task, write, b"")
        except SlowReader:
            return "slow"
        return "read"

    left, read = asyncio.create_task(written()), asyncio.create_task(written())
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    going_on.set()
    assert await read == "read"
    going_on.clear()
    monkeypatch.setattr(unread, "UNREAD_S", 0.01)
    keeping = asyncio.create_task(found.keep())
    assert await asyncio.create_task(written()) == "slow"
    keeping.cancel()
