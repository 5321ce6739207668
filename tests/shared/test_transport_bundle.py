"""Bundled calls: what the contract of all transports (test_transport_base.py) does not say of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from manylora.v1 import bundle_pb2
from manylora_shared.coordination.peers import PeerTransport, guarded
from manylora_shared.errors import Code, RpcError
from manylora_shared.metadata import PEER_KEY
from manylora_shared.transport.base import Channel, Service, methods_of
from manylora_shared.transport.bundles import server as bundle_server
from manylora_shared.transport.bundles.client import BundlingTransport
from manylora_shared.transport.bundles.messages import WINDOW
from manylora_shared.transport.bundles.server import BundleServer, UnbundlingTransport
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_shared.transport.handling import MAX_MESSAGE_BYTES
from manylora_sim.network import MemoryNetwork
from manylora_sim.peers import SIMULATED

from tests.shared.transport_echo import DESCRIPTOR, METHODS, echo_service, text

CARRY = methods_of(bundle_pb2.DESCRIPTOR.services_by_name["BundleService"])["Carry"]
STREAM = METHODS["ServerStream"]
SOON_S = 5.0


class Counting:
    """A transport whose channels count the streams that are opened and the messages that are read from them."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.opened = 0
        self.read = 0

    def connect(self, address: str) -> Any:
        counts, channel = self, self._transport.connect(address)

        class Reading:
            def __init__(self, stream: Any) -> None:
                self._stream = stream
                self.write, self.cancel = stream.write, stream.cancel

            async def read(self) -> Any:
                message = await self._stream.read()
                counts.read += message is not None
                return message

        class Opening:
            close = channel.close

            def stream(self, *arguments: Any, **options: Any) -> Reading:
                counts.opened += 1
                return Reading(channel.stream(*arguments, **options))

        return Opening()

    async def serve(self, address: str, services: Any) -> Any:
        return await self._transport.serve(address, services)


class Net:
    def __init__(self) -> None:
        self.network = MemoryNetwork(random.Random(3), min_delay_s=0.0001, max_delay_s=0.002)
        self.counting = Counting(self.network.transport("client"))

    @asynccontextmanager
    async def running(self, handler: Callable[..., Any]) -> AsyncIterator[tuple[Any, Channel]]:
        transport = UnbundlingTransport(self.network.transport("server"))
        server = await transport.serve("127.0.0.1:0", [echo_service(ServerStream=handler)])
        channel = BundlingTransport(self.counting, [DESCRIPTOR]).connect(server.address)
        try:
            yield server, channel
        finally:
            await channel.close()
            await server.stop(0)


async def read_all(stream: Any) -> list[str]:
    found: list[str] = []
    while (message := await stream.read()) is not None:
        found.append(message.text)
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_what_many_calls_say_at_a_time_is_one_message() -> None:
    beats = [asyncio.Event() for _ in range(10)]

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        for beat in beats:
            await beat.wait()
            yield text(request.text)

    net = Net()
    async with net.running(handler) as (_, channel):
        streams = [channel.stream(STREAM, text(str(i))) for i in range(50)]
        reading = [asyncio.create_task(read_all(stream)) for stream in streams]
        for beat in beats:
            await asyncio.sleep(0.01)
            beat.set()
        assert await asyncio.gather(*reading) == [[str(i)] * 10 for i in range(50)]
    assert net.counting.opened == 1
    assert net.counting.read <= 2 * len(beats), "50 answers a beat are to come as one message"


async def test_an_unread_call_holds_up_its_own_handler_and_nobody_else() -> None:
    made: dict[str, int] = {}

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        for i in range(200):
            made[request.text] = i + 1
            yield text(str(i))

    async with Net().running(handler) as (_, channel):
        unread = channel.stream(STREAM, text("unread"))
        assert await read_all(channel.stream(STREAM, text("read"))) == [str(i) for i in range(200)]
        await asyncio.sleep(0.05)
        assert made["unread"] == WINDOW + 1, "one more is made, and waits"
        assert await read_all(unread) == [str(i) for i in range(200)]


async def test_a_cancelled_call_ends_its_handler_and_no_other() -> None:
    ended: list[str] = []

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            for _ in range(3):
                yield text(request.text)
                await asyncio.sleep(0.02)
        finally:
            ended.append(request.text)

    async with Net().running(handler) as (_, channel):
        one, other = (channel.stream(STREAM, text(name)) for name in ("one", "other"))
        await one.read()
        one.cancel()
        await eventually(lambda: ended == ["one"])
        assert await read_all(other) == ["other"] * 3
        with pytest.raises(RpcError) as caught:
            await one.read()
        assert caught.value.code is Code.CANCELLED


async def test_a_caller_that_stops_waiting_cancels_its_call() -> None:
    ended = asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
            yield text("")
        finally:
            ended.set()

    async with Net().running(handler) as (_, channel):
        stream = channel.stream(STREAM, text(""))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read(), 0.05)
        await asyncio.wait_for(ended.wait(), SOON_S)


async def test_when_the_stream_breaks_all_calls_end_and_the_next_one_opens_another() -> None:
    ended: list[str] = []

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text(request.text)
            await asyncio.Event().wait()
        finally:
            ended.append(request.text)

    net = Net()
    async with net.running(handler) as (_, channel):
        streams = [channel.stream(STREAM, text(str(i))) for i in range(3)]
        for stream in streams:
            await stream.read()
        net.network.drop_connections("client", "server")
        for stream in streams:
            with pytest.raises(RpcError) as caught:
                await asyncio.wait_for(stream.read(), SOON_S)
            assert caught.value.code is Code.UNAVAILABLE
        await eventually(lambda: sorted(ended) == ["0", "1", "2"])
        again = channel.stream(STREAM, text("again"))
        assert (await again.read()).text == "again"
    assert net.counting.opened == 2


async def test_a_server_that_stops_lets_its_calls_end_and_waits_for_nothing_else() -> None:
    goes_on = asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text("first")
        await goes_on.wait()
        yield text("last")

    async with Net().running(handler) as (server, channel):
        running = channel.stream(STREAM, text(""))
        await running.read()
        stopping = asyncio.create_task(server.stop(60.0))
        await asyncio.sleep(0.02)
        with pytest.raises(RpcError) as caught:
            await channel.stream(STREAM, text("")).read()
        assert caught.value.code is Code.UNAVAILABLE
        assert not stopping.done()
        goes_on.set()
        assert await read_all(running) == ["last"]
        await asyncio.wait_for(stopping, SOON_S)


async def test_an_idle_stream_does_not_hold_up_the_stop_of_a_grpc_server() -> None:
    server = await UnbundlingTransport(GrpcTransport()).serve("127.0.0.1:0", [echo_service()])
    channel = BundlingTransport(GrpcTransport(), [DESCRIPTOR]).connect(server.address)
    assert await read_all(channel.stream(STREAM, text("a,b"))) == ["a", "b"]
    await asyncio.wait_for(server.stop(60.0), SOON_S)
    with pytest.raises(RpcError) as caught:
        await channel.stream(STREAM, text("a")).read()
    assert caught.value.code is Code.UNAVAILABLE
    await channel.close()


async def test_long_answers_come_whole_and_in_order_beside_others() -> None:
    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        for i in range(20):
            yield text(f"{i}:" + request.text * (300_000 if request.text == "x" else 1))

    async with Net().running(handler) as (_, channel):
        long, short = channel.stream(STREAM, text("x")), channel.stream(STREAM, text("y"))
        answers = await asyncio.gather(read_all(long), read_all(short))
    assert answers[0] == [f"{i}:" + "x" * 300_000 for i in range(20)]
    assert answers[1] == [f"{i}:y" for i in range(20)]


async def test_a_request_that_is_too_long_is_refused_and_harms_no_other() -> None:
    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text(str(len(request.text)))

    async with Net().running(handler) as (_, channel):
        with pytest.raises(RpcError) as caught:
            channel.stream(STREAM, text("x" * MAX_MESSAGE_BYTES))
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        fits = MAX_MESSAGE_BYTES - 1000
        assert await read_all(channel.stream(STREAM, text("x" * fits))) == [str(fits)]


async def test_what_a_server_does_not_know_is_refused_by_call() -> None:
    """By the wire: a method that is not there, a number that is taken, and parts of calls that are over."""

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text("one")
        await asyncio.Event().wait()

    net = Net()
    async with net.running(handler) as (server, _):
        channel = net.network.transport("client").connect(server.address)
        carry = channel.stream(CARRY)
        opened = bundle_pb2.CallOpen(method=STREAM.path, credit=5)
        part = bundle_pb2.CallPart
        await carry.write(
            bundle_pb2.CallBundle(
                parts=[
                    part(call=9, credit=1),
                    part(call=9, cancel=True),
                    part(call=1, open=bundle_pb2.CallOpen(method="/no.Such/Method", credit=1)),
                    part(call=2, open=opened),
                    part(call=2, open=opened),
                ]
            )
        )
        found: dict[int, list[bundle_pb2.AnswerPart]] = {}
        while sum(map(len, found.values())) < 3:
            for answer in (await asyncio.wait_for(carry.read(), SOON_S)).parts:
                found.setdefault(answer.call, []).append(answer)
        assert [answer.end.code for answer in found[1]] == [int(Code.UNIMPLEMENTED)]
        assert sorted(answer.WhichOneof("what") for answer in found[2]) == ["end", "response"]
        await channel.close()


async def test_an_answer_that_makes_no_sense_ends_all_calls_of_its_stream_and_leaves_none_waiting() -> None:
    async def carry(bundles: Any, call: Any) -> AsyncIterator[Any]:
        await anext(bundles)
        await asyncio.sleep(0.02)
        yield bundle_pb2.AnswerBundle(parts=[bundle_pb2.AnswerPart(call=1, end=bundle_pb2.CallEnd(code=99))])
        await asyncio.Event().wait()

    net = MemoryNetwork(random.Random(3))
    service = Service(bundle_pb2.DESCRIPTOR.services_by_name["BundleService"], {"Carry": carry})
    server = await net.transport("server").serve("127.0.0.1:0", [service])
    channel = BundlingTransport(net.transport("client"), [DESCRIPTOR]).connect(server.address)
    for stream in [channel.stream(STREAM, text("")) for _ in range(2)]:
        with pytest.raises(RpcError) as caught:
            await asyncio.wait_for(stream.read(), SOON_S)
        assert caught.value.code is Code.INTERNAL
    await channel.close()
    await server.stop(0)


async def test_a_stream_without_the_secret_ends_before_anything_of_it_is_read() -> None:
    began: list[str] = []

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        began.append(request.text)
        yield text(request.text)

    secret = SIMULATED
    network = MemoryNetwork(random.Random(3))
    served = UnbundlingTransport(network.transport("server"))
    server = await served.serve("127.0.0.1:0", [guarded(echo_service(ServerStream=handler), secret)])
    bundling = BundlingTransport(network.transport("client"), [DESCRIPTOR], line_keys=[PEER_KEY])
    known = PeerTransport(bundling, secret).connect(server.address)
    assert await read_all(known.stream(STREAM, text("known"))) == ["known"]
    for shown in ({}, {PEER_KEY: ""}, {PEER_KEY: "guessed"}):
        stranger = network.transport("stranger").connect(server.address)
        carry = stranger.stream(CARRY, metadata=shown)
        opened = bundle_pb2.CallOpen(method=STREAM.path, metadata=secret.metadata(), credit=5)
        with suppress(RpcError):
            await carry.write(bundle_pb2.CallBundle(parts=[bundle_pb2.CallPart(call=1, open=opened)]))
        with pytest.raises(RpcError) as caught:
            await asyncio.wait_for(carry.read(), SOON_S)
        assert caught.value.code is Code.UNAUTHENTICATED
        await stranger.close()
    inner = known.stream(CARRY)  # the stream is let in, and still each call shows the secret itself
    opened = bundle_pb2.CallOpen(method=STREAM.path, credit=5)
    await inner.write(bundle_pb2.CallBundle(parts=[bundle_pb2.CallPart(call=1, open=opened)]))
    (answer,) = (await asyncio.wait_for(inner.read(), SOON_S)).parts
    assert answer.end.code == int(Code.UNAUTHENTICATED)
    assert began == ["known"]
    await known.close()
    await server.stop(0)


async def test_what_a_busy_caller_has_not_read_goes_in_one_bundle() -> None:
    """Not in as many as there were steps meanwhile, of which it would read the oldest first."""
    all_said, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        for index in range(20):
            yield text(str(index))
            await asyncio.sleep(0.01)
        all_said.set()
        await go_on.wait()

    network = MemoryNetwork(random.Random(3))
    served = UnbundlingTransport(network.transport("server"))
    server = await served.serve("127.0.0.1:0", [echo_service(ServerStream=handler)])
    channel = network.transport("client").connect(server.address)
    carry = channel.stream(CARRY)

    async def read() -> int:
        return len((await asyncio.wait_for(carry.read(), SOON_S)).parts)

    opened = bundle_pb2.CallOpen(method=STREAM.path, credit=100)
    parts = [bundle_pb2.CallPart(bundles_ahead=3), bundle_pb2.CallPart(call=1, open=opened)]
    await carry.write(bundle_pb2.CallBundle(parts=parts))
    await all_said.wait()
    assert [await read() for _ in range(3)] == [1, 1, 1]
    await carry.write(bundle_pb2.CallBundle(parts=[bundle_pb2.CallPart(bundles_read=3)]))
    assert await read() == 17
    go_on.set()
    assert await read() == 1, "its end"
    carry.cancel()
    await channel.close()
    await server.stop(0)


async def test_very_many_parts_at_once_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_server, "MAX_CALLS", 100)

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield text("")

    over, answered = asyncio.Event(), 0
    most_parts, turns = 20_000, 0

    async def said() -> AsyncIterator[bundle_pb2.CallBundle]:
        opened = bundle_pb2.CallOpen(method=STREAM.path, credit=1)
        parts = [bundle_pb2.CallPart(call=i, open=opened) for i in range(most_parts)]
        yield bundle_pb2.CallBundle(parts=parts)
        await over.wait()

    class Call:
        peer = "a test"

    carry = BundleServer([echo_service(ServerStream=handler)]).service().handlers["Carry"]

    async def answer() -> None:
        nonlocal answered
        async for bundle in carry(said(), Call()):
            answered += sum(part.end.code == int(Code.RESOURCE_EXHAUSTED) for part in bundle.parts)
            if answered == most_parts - 100:
                over.set()

    answering = asyncio.create_task(answer())
    while not over.is_set():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= most_parts // 128, "others had their turns meanwhile"
    await answering


async def test_calls_at_random_see_what_they_would_see_one_by_one() -> None:
    """Reads, pauses, cancels and failures of forty calls at a time, over a network with delays."""
    rng = random.Random(11)
    running = 0

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        nonlocal running
        running += 1
        name, count, fails = request.text.split("/")
        try:
            for i in range(int(count)):
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.002)
                yield text(f"{name}-{i}")
            if fails == "1":
                raise RpcError(Code.ABORTED, name)
        finally:
            running -= 1

    async def caller(channel: Channel, name: int) -> None:
        count, fails = rng.randrange(0, 4 * WINDOW), rng.random() < 0.3
        leaves_after = rng.randrange(0, 2 * WINDOW) if rng.random() < 0.3 else None
        stream = channel.stream(STREAM, text(f"{name}/{count}/{int(fails)}"))
        for i in range(count):
            if i == leaves_after:
                stream.cancel()
                return
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.003)
            assert (await asyncio.wait_for(stream.read(), SOON_S)).text == f"{name}-{i}"
        if fails:
            with pytest.raises(RpcError) as caught:
                await stream.read()
            assert (caught.value.code, caught.value.message) == (Code.ABORTED, str(name))
        else:
            assert await stream.read() is None

    net = Net()
    async with net.running(handler) as (_, channel):
        for wave in range(5):
            await asyncio.gather(*(caller(channel, 100 * wave + i) for i in range(40)))
        await eventually(lambda: running == 0)
    assert net.counting.opened == 1


async def test_a_cancellation_that_comes_behind_the_streams_end_interrupts_no_cleaning_up() -> None:
    """A server that stops ends its streams and cancels their handlers. Where the end was heard of first, the
    cancellation came while the calls' handlers were being waited for: `stop` returned before they had cleaned up."""
    cleaning, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text("first")
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.sleep(0.01)
            ended.set()

    over = asyncio.Event()

    async def said() -> AsyncIterator[bundle_pb2.CallBundle]:
        opened = bundle_pb2.CallOpen(method=STREAM.path, request=text("").SerializeToString(), credit=WINDOW)
        yield bundle_pb2.CallBundle(parts=[bundle_pb2.CallPart(call=1, open=opened)])
        await over.wait()

    class Call:
        peer = "a test"

    carry = BundleServer([echo_service(ServerStream=handler)]).service().handlers["Carry"]
    read = asyncio.Event()

    async def answer() -> None:
        async for _ in carry(said(), Call()):
            read.set()

    answering = asyncio.create_task(answer())
    await read.wait()
    over.set()
    await cleaning.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert ended.is_set()
