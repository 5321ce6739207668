"""What every transport does alike: the suite runs over gRPC on loopback and over the in-memory network."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from manylora_shared.errors import Code, FieldViolation, InvalidRequest, Overloaded, RpcError, SlowReader
from manylora_shared.transport.base import Channel, Method, Server, Transport, methods_of
from manylora_shared.transport.bundles.client import BundlingTransport
from manylora_shared.transport.bundles.server import UnbundlingTransport
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_sim.network import MemoryNetwork

from tests.shared.transport_echo import DESCRIPTOR, METHODS, echo_service, text

HEALTH = methods_of(health_pb2.DESCRIPTOR.services_by_name["Health"])
SOON_S = 5.0


@dataclass
class Net:
    server: Transport
    client: Transport

    @asynccontextmanager
    async def running(self, **handlers: Callable[..., Any]) -> AsyncIterator[tuple[Server, Channel]]:
        server = await self.server.serve("127.0.0.1:0", [echo_service(**handlers)])
        channel = self.client.connect(server.address)
        try:
            yield server, channel
        finally:
            await channel.close()
            await server.stop(0)


@pytest_asyncio.fixture(params=["grpc", "grpc, 3 acceptors", "memory", "grpc, bundled", "memory, bundled"])
async def net(request: pytest.FixtureRequest) -> Net:
    network = MemoryNetwork(random.Random(7), min_delay_s=0.0001, max_delay_s=0.002)
    match request.param.split(", "):
        case ["grpc", "bundled"]:
            return Net(UnbundlingTransport(GrpcTransport()), BundlingTransport(GrpcTransport(), [DESCRIPTOR]))
        case ["memory", "bundled"]:
            ends = network.transport("server"), network.transport("client")
            return Net(UnbundlingTransport(ends[0]), BundlingTransport(ends[1], [DESCRIPTOR]))
        case ["memory"]:
            return Net(network.transport("server"), network.transport("client"))
        case ["grpc", *more]:
            return Net(GrpcTransport(acceptors=3 if more else 1), GrpcTransport())
        case other:
            raise AssertionError(other)


async def read_all(stream: Any) -> list[str]:
    found: list[str] = []
    while (message := await stream.read()) is not None:
        found.append(message.text)
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_known_to_be_there_is_read_without_a_wait(net: Net) -> None:
    async with net.running() as (_, channel):
        stream = channel.stream(METHODS["ServerStream"], text("a,b,c"))
        assert not stream.has_message, "nothing can have come yet"
        found = []
        while (message := await stream.read()) is not None:
            found.append(message.text)
            while stream.has_message:
                reading = asyncio.ensure_future(stream.read())
                await asyncio.sleep(0)
                assert reading.done()
                found.append(reading.result().text)
        assert found == ["a", "b", "c"]
        assert not stream.has_message


async def test_the_four_kinds_of_calls(net: Net) -> None:
    async with net.running() as (_, channel):
        assert (await channel.call(METHODS["Unary"], text("a"))).text == "a"
        assert await read_all(channel.stream(METHODS["ServerStream"], text("a,b,c"))) == ["a", "b", "c"]
        stream = channel.stream(METHODS["ClientStream"])
        for part in "xyz":
            await stream.write(text(part))
        await stream.close_send()
        await asyncio.sleep(0.02)  # the answer is there before anybody reads it
        assert await read_all(stream) == ["x,y,z"]
        stream = channel.stream(METHODS["Bidi"])
        for part in "pq":
            await stream.write(text(part))
            assert (await stream.read()).text == part
        await stream.close_send()
        assert await stream.read() is None
        assert await stream.read() is None


async def test_metadata_peer_and_deadline_reach_the_handler(net: Net) -> None:
    seen: list[Any] = []

    async def handler(request: Any, call: Any) -> Any:
        seen.append((dict(call.metadata), call.peer, call.time_remaining()))
        return text("ok")

    async with net.running(Unary=handler) as (_, channel):
        await channel.call(METHODS["Unary"], text(""), metadata={"x-tenant-id": "acme"}, timeout=3.0)
        await channel.call(METHODS["Unary"], text(""))
    metadata, peer, remaining = seen[0]
    assert metadata["x-tenant-id"] == "acme"
    assert peer
    assert 2.0 < remaining < 3.1  # gRPC rounds a deadline up
    assert seen[1][2] is None
    assert "x-tenant-id" not in seen[1][0]


async def test_a_manylora_error_arrives_whole(net: Net) -> None:
    async def unary(request: Any, call: Any) -> Any:
        raise InvalidRequest.of_all([FieldViolation("sampling.top_p", "must be at most 1"), FieldViolation("n", "ü")])

    async def server_stream(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text("first")
        raise Overloaded("queue is full", retry_after_s=1.25)

    async with net.running(Unary=unary, ServerStream=server_stream) as (_, channel):
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text(""))
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert caught.value.message == "sampling.top_p: must be at most 1; n: ü"
        assert caught.value.violations == (
            FieldViolation("sampling.top_p", "must be at most 1"),
            FieldViolation("n", "ü"),
        )
        assert caught.value.retry_after_s is None
        assert caught.value.label == "invalid"
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert (caught.value.code, caught.value.message) == (Code.RESOURCE_EXHAUSTED, "queue is full")
        assert caught.value.retry_after_s == 1.25
        with pytest.raises(RpcError):
            await stream.read()


async def test_an_error_of_any_size_keeps_its_code(net: Net) -> None:
    async def handler(request: Any, call: Any) -> Any:
        raise InvalidRequest.of_all([FieldViolation(f"tensor.{i}", "x" * 500) for i in range(500)])

    async with net.running(Unary=handler) as (_, channel):
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text(""))
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.message.startswith("tensor.0: x")
    assert caught.value.violations


async def test_an_error_passed_on_by_a_proxy_stays_itself(net: Net) -> None:
    async def origin(request: Any, call: Any) -> Any:
        raise SlowReader("did not read")

    async with net.running(Unary=origin) as (_, inner):

        async def proxy(request: Any, call: Any) -> Any:
            return await inner.call(METHODS["Unary"], request)

        async with net.running(Unary=proxy) as (_, outer):
            with pytest.raises(RpcError) as caught:
                await outer.call(METHODS["Unary"], text(""))
    assert (caught.value.code, caught.value.label) == (Code.RESOURCE_EXHAUSTED, "slow_reader")


async def test_an_unknown_exception_is_internal_and_stays_private(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Any, call: Any) -> Any:
        raise KeyError("secret")

    async with net.running(Unary=handler) as (_, channel):
        with caplog.at_level(logging.ERROR), pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text(""))
    assert caught.value.code is Code.INTERNAL
    assert "secret" not in caught.value.message
    assert "secret" in caplog.text


async def test_a_stray_cancellation_inside_a_handler_is_internal(net: Net) -> None:
    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text("first")
        raise asyncio.CancelledError

    async with net.running(ServerStream=handler) as (_, channel):
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        with pytest.raises(RpcError) as caught:
            await asyncio.wait_for(stream.read(), SOON_S)
    assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize("name", ["Unary", "ServerStream", "ClientStream", "Bidi"])
async def test_bytes_that_are_no_message_are_refused_by_name(net: Net, name: str) -> None:
    async with net.running() as (_, channel):
        method = METHODS[name]
        garbage: Any = _Garbage()

        async def send_garbage() -> None:
            if method.client_streaming:
                stream = channel.stream(method)
                await stream.write(garbage)
                await stream.read()
            elif method.server_streaming:
                await channel.stream(method, garbage).read()
            else:
                await channel.call(method, garbage)

        with pytest.raises(RpcError) as caught:
            await send_garbage()
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert "manylora.test.Text" in caught.value.message
        assert (await channel.call(METHODS["Unary"], text("still up"))).text == "still up"


class _Garbage:
    """Stands for a message whose bytes are not one."""

    def SerializeToString(self) -> bytes:
        return b"\x0a\xff\xff\xff\xff\x0f"


async def test_an_unknown_method_is_unimplemented(net: Net) -> None:
    unary = METHODS["Unary"]
    missing = Method("/manylora.test.EchoService/Nothing", unary.request_type, unary.response_type, False, False)
    async with net.running() as (_, channel):
        with pytest.raises(RpcError) as caught:
            await channel.call(missing, text(""))
    assert caught.value.code is Code.UNIMPLEMENTED


async def test_cancelling_a_stream_cancels_its_handler(net: Net) -> None:
    ended: list[str] = []
    has_sent = asyncio.Event()  # a cancel that comes before closes the handler, and is not raised in it

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text("first")
            has_sent.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            ended.append("finally")

    async with net.running(ServerStream=handler) as (_, channel):
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        await has_sent.wait()
        stream.cancel()
        stream.cancel()
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code is Code.CANCELLED
        await eventually(lambda: ended == ["cancelled", "finally"])


async def test_cancelling_a_stream_whose_handler_is_blocked_in_sending(net: Net) -> None:
    ended: list[str] = []

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield text("x" * 100_000)
        finally:
            await asyncio.sleep(0)
            ended.append("finally")

    async with net.running(ServerStream=handler) as (_, channel):
        stream = channel.stream(METHODS["ServerStream"], text(""))
        await stream.read()
        await asyncio.sleep(0.05)
        assert not ended
        stream.cancel()
        await eventually(lambda: ended == ["finally"])


async def test_cancelling_the_waiting_task_cancels_the_call(net: Net) -> None:
    entered = asyncio.Event()
    ended: list[str] = []

    async def unary(request: Any, call: Any) -> Any:
        try:
            entered.set()
            await asyncio.Event().wait()
        finally:
            ended.append("unary")

    async def server_stream(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            entered.set()
            await asyncio.Event().wait()
            yield text("never")
        finally:
            ended.append("stream")

    async with net.running(Unary=unary, ServerStream=server_stream) as (_, channel):
        task = asyncio.create_task(channel.call(METHODS["Unary"], text("")))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: ended == ["unary"])
        entered.clear()
        stream = channel.stream(METHODS["ServerStream"], text(""))
        task = asyncio.create_task(stream.read())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: ended == ["unary", "stream"])
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code is Code.CANCELLED


async def test_closing_the_channel_ends_its_calls(net: Net) -> None:
    ended: list[str] = []

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text("first")
            await asyncio.Event().wait()
        finally:
            ended.append("finally")

    async with net.running(ServerStream=handler) as (_, channel):
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        await channel.close()
        with pytest.raises(RpcError) as caught:
            await reading
        assert caught.value.code in (Code.CANCELLED, Code.UNAVAILABLE)
        await eventually(lambda: ended == ["finally"])
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text(""))
        assert caught.value.code is Code.UNAVAILABLE


async def test_a_deadline_ends_the_call_on_both_sides(net: Net) -> None:
    ended: list[str] = []

    async def unary(request: Any, call: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("unary")

    async def server_stream(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text("first")
            await asyncio.Event().wait()
        finally:
            ended.append("stream")

    async with net.running(Unary=unary, ServerStream=server_stream) as (_, channel):
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text(""), timeout=0.1)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        await eventually(lambda: ended == ["unary"])
        stream = channel.stream(METHODS["ServerStream"], text(""), timeout=0.1)
        assert (await stream.read()).text == "first"
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        await eventually(lambda: ended == ["unary", "stream"])


async def test_nobody_listening_is_unavailable_and_a_later_server_is_found(net: Net) -> None:
    server = await net.server.serve("127.0.0.1:0", [echo_service()])
    address = server.address
    await server.stop(0)
    channel = net.client.connect(address)
    with pytest.raises(RpcError) as caught:
        await channel.call(METHODS["Unary"], text(""), timeout=2.0)
    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(RpcError) as caught:
        await channel.stream(METHODS["ServerStream"], text(""), timeout=2.0).read()
    assert caught.value.code is Code.UNAVAILABLE
    server = await net.server.serve(address, [echo_service()])
    codes: list[Code] = []
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                assert (await channel.call(METHODS["Unary"], text("back"))).text == "back"
                break
            except RpcError as e:
                codes.append(e.code)
                await asyncio.sleep(0.05)
    assert set(codes) <= {Code.UNAVAILABLE}
    await channel.close()
    await server.stop(0)


async def test_an_address_in_use_is_an_oserror(net: Net) -> None:
    async with net.running() as (server, _):
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await net.server.serve(server.address, [echo_service()])
    with pytest.raises(ValueError, match="host:port"):
        await net.server.serve("nonsense", [echo_service()])


async def test_stop_lets_running_calls_finish_within_the_grace(net: Net) -> None:
    release = asyncio.Event()

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text("first")
        await release.wait()
        yield text("last")

    async with net.running(ServerStream=handler) as (server, channel):
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        stopping = asyncio.create_task(server.stop(SOON_S))
        await asyncio.sleep(0.05)
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text(""), timeout=2.0)
        assert caught.value.code is Code.UNAVAILABLE
        release.set()
        assert await read_all(stream) == ["last"]
        await stopping


async def test_stop_without_grace_cancels_handlers_and_waits_for_their_end(net: Net) -> None:
    ended: list[str] = []

    async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            yield text("first")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("finally")

    async with net.running(ServerStream=handler) as (server, channel):
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        await server.stop(0)
        assert ended == ["finally"]
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code in (Code.UNAVAILABLE, Code.CANCELLED)


async def test_writing_after_the_end_raises_the_calls_status(net: Net) -> None:
    async def bidi(requests: Any, call: Any) -> AsyncIterator[Any]:
        raise Overloaded("no room")
        yield

    async with net.running(Bidi=bidi) as (_, channel):
        stream = channel.stream(METHODS["Bidi"])
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        with pytest.raises(RpcError) as caught:
            await stream.write(text("late"))
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        await stream.close_send()
        stream.cancel()
        stream = channel.stream(METHODS["ClientStream"])
        await stream.close_send()
        with pytest.raises(RpcError):
            await stream.write(text("late"))
        assert await read_all(stream) == [""]


async def test_a_writer_that_nobody_reads_waits_and_hears_of_the_end(net: Net) -> None:
    release = asyncio.Event()

    async def client_stream(requests: Any, call: Any) -> Any:
        await release.wait()
        raise Overloaded("enough")

    async with net.running(ClientStream=client_stream) as (_, channel):
        stream = channel.stream(METHODS["ClientStream"])
        written = 0

        async def write() -> None:
            nonlocal written
            while True:
                await stream.write(text("x" * 100_000))
                written += 1

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.05)
        assert not writing.done()
        assert written < 200
        release.set()
        with pytest.raises(RpcError) as caught:
            await asyncio.wait_for(writing, SOON_S)
        assert (caught.value.code, caught.value.message) == (Code.RESOURCE_EXHAUSTED, "enough")


async def test_messages_over_the_limit_are_refused(net: Net) -> None:
    async with net.running() as (_, channel):
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["Unary"], text("x" * (4 * 1024 * 1024 + 1)))
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        assert (await channel.call(METHODS["Unary"], text("still up"))).text == "still up"


async def test_many_streams_at_once_keep_their_order(net: Net) -> None:
    parts = [str(i) for i in range(100)]
    async with net.running() as (_, channel):
        streams = [channel.stream(METHODS["ServerStream"], text(",".join(parts))) for _ in range(20)]
        assert await asyncio.gather(*(read_all(s) for s in streams)) == [parts] * 20


async def test_health_follows_set_serving(net: Net) -> None:
    request = health_pb2.HealthCheckRequest
    status = health_pb2.HealthCheckResponse
    async with net.running() as (server, channel):
        for name in ("", DESCRIPTOR.full_name):
            found = await channel.call(HEALTH["Check"], request(service=name))
            assert found.status == status.NOT_SERVING
        watch = channel.stream(HEALTH["Watch"], request())
        assert (await watch.read()).status == status.NOT_SERVING
        server.set_serving(True)
        assert (await watch.read()).status == status.SERVING
        assert (await channel.call(HEALTH["Check"], request(service=DESCRIPTOR.full_name))).status == status.SERVING
        server.set_serving(False)
        assert (await watch.read()).status == status.NOT_SERVING
        watch.cancel()
        with pytest.raises(RpcError) as caught:
            await channel.call(HEALTH["Check"], request(service="nobody"))
        assert caught.value.code is Code.NOT_FOUND
