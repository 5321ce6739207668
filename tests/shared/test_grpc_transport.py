"""What is gRPC's own: peers that fall silent, stock health and reflection clients, addresses."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from manylora_shared.errors import Code, FieldViolation, ManyloraError, QuotaBreach, QuotaExceeded, RpcError
from manylora_shared.transport import grpc_transport
from manylora_shared.transport.grpc_transport import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, GrpcTransport
from manylora_shared.transport.status import decode_error, encode_details

from tests.shared.transport_echo import METHODS, echo_service, text

FOLDER = Path(__file__).parent
SERVER_PROGRAM = """
import asyncio
from manylora_shared.transport.grpc_transport import GrpcTransport
from transport_echo import echo_service, text

async def forever(request, call):
    yield text("first")
    await asyncio.Event().wait()

async def main():
    server = await GrpcTransport().serve("127.0.0.1:0", [echo_service(ServerStream=forever)])
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_silent_or_dead_server_ends_its_streams_in_time(how: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER_PROGRAM,
        env={**os.environ, "PYTHONPATH": f"{FOLDER}:{FOLDER.parents[1] / 'shared'}"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    channel = GrpcTransport().connect((await process.stdout.readline()).decode().strip())
    try:
        stream = channel.stream(METHODS["ServerStream"], text(""))
        assert (await stream.read()).text == "first"
        loop = asyncio.get_running_loop()
        process.send_signal(how)
        started = loop.time()
        with pytest.raises(RpcError) as caught:
            await asyncio.wait_for(stream.read(), 10)
        assert caught.value.code is Code.UNAVAILABLE
        assert loop.time() - started < (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000 + 1.0
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_stock_clients_of_health_and_reflection_are_served() -> None:
    server = await GrpcTransport().serve("127.0.0.1:0", [echo_service()])
    server.set_serving(True)
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "manylora.test.EchoService"):
            found = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        listed = await health.List(health_pb2.HealthListRequest())
        assert set(listed.statuses) == {"", "manylora.test.EchoService"}

        async def requests() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="manylora.test.EchoService")

        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(requests())]
        assert [s.name for s in answers[0].list_services_response.service] == sorted(
            ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "manylora.test.EchoService"]
        )
        assert b"EchoService" in answers[1].file_descriptor_response.file_descriptor_proto[0]
    await server.stop(0)


async def all_of_it_comes() -> None:
    """Start the calls made; what they send comes to the server's side while the loop, which is both's, takes none."""
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 -- to hold the loop is the purpose


async def place_of_others(acceptors: int, burst: int = 300, others: int = 12) -> list[int]:
    """One connection sends a burst of calls, then others one each: how many of all had begun when theirs did.

    The loop is held after each, so that all of the burst has come to the server before the others' calls do,
    and all of these before any further one is taken: what a slow or busy machine changes is no part of the order.
    """
    begun: list[str] = []

    async def unary(request: Any, call: Any) -> Any:
        begun.append(request.text)
        return text("")

    server = await GrpcTransport(acceptors=acceptors).serve("127.0.0.1:0", [echo_service(Unary=unary)])
    channels = [GrpcTransport().connect(server.address) for _ in range(1 + others)]
    for channel in channels:
        await channel.call(METHODS["Unary"], text("warm"))
    begun.clear()
    calls = [asyncio.create_task(channels[0].call(METHODS["Unary"], text("burst"))) for _ in range(burst)]
    await all_of_it_comes()
    calls += [asyncio.create_task(channel.call(METHODS["Unary"], text("other"))) for channel in channels[1:]]
    await all_of_it_comes()
    await asyncio.gather(*calls)
    for channel in channels:
        await channel.close()
    await server.stop(0)
    return [place for place, who in enumerate(begun) if who == "other"]


async def test_a_burst_of_calls_holds_up_its_own_connection() -> None:
    """But for those that share its acceptor: one in sixteen."""
    behind = sorted(await place_of_others(1))
    assert behind[6] > 200, "one acceptor takes the calls in the order of coming"
    assert sorted(await place_of_others(16))[6] < 100


async def test_two_servers_on_one_port_are_an_error_however_many_acceptors_they_have() -> None:
    for acceptors in (1, 4):
        server = await GrpcTransport(acceptors=acceptors).serve("127.0.0.1:0", [echo_service()])
        for others in (1, 4):
            with pytest.raises(OSError, match="cannot listen on 127"):
                await GrpcTransport(acceptors=others).serve(server.address, [echo_service()])
        await server.stop(0)
        again = await GrpcTransport(acceptors=acceptors).serve(server.address, [echo_service()])
        assert again.address == server.address
        await again.stop(0)


async def test_calls_beyond_the_most_are_refused_over_all_acceptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "MAX_CONCURRENT_CALLS", 8)
    going_on = asyncio.Event()

    async def stream(request: Any, call: Any) -> AsyncIterator[Any]:
        yield text("begun")
        await going_on.wait()

    server = await GrpcTransport(acceptors=4).serve("127.0.0.1:0", [echo_service(ServerStream=stream)])
    channels = [GrpcTransport().connect(server.address) for _ in range(9)]
    streams = [channel.stream(METHODS["ServerStream"], text("")) for channel in channels[:8]]
    for each in streams:
        assert (await each.read()).text == "begun"
    late = channels[8].stream(METHODS["ServerStream"], text(""))
    with pytest.raises(RpcError, match="8 calls are under way here") as caught:
        await late.read()
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    going_on.set()
    assert await streams[0].read() is None
    for channel in channels:
        await channel.close()
    await server.stop(0)


async def test_a_server_that_speaks_no_google_rpc_details_is_understood() -> None:
    error = decode_error(Code.NOT_FOUND, "gone", b"\xff\xff")
    assert (error.code, error.message, error.violations, error.label) == (Code.NOT_FOUND, "gone", (), "not_found")
    for retry_after_s in (0.0, 0.25, 90.5):
        whole = ManyloraError("m", violations=[FieldViolation("f", "d")], retry_after_s=retry_after_s)
        error = decode_error(Code.INTERNAL, "m", encode_details(whole))
        assert (error.retry_after_s, error.violations) == (retry_after_s, whole.violations)


def test_quotas_travel_in_the_details() -> None:
    breach = QuotaBreach("classes.batch.token_bucket", "acme", 500, "3 tokens are needed", 900)
    error = QuotaExceeded("too much", retry_after_s=1.25, breaches=[breach])
    details = encode_details(error)
    seen = decode_error(error.code, error.message, details)
    assert (seen.breaches, seen.retry_after_s, seen.label) == ((breach,), 1.25, "quota_exceeded")
    status = status_pb2.Status.FromString(details)
    kinds = [detail.TypeName().rpartition(".")[2] for detail in status.details]
    assert kinds == ["ErrorInfo", "QuotaFailure", "RetryInfo"]
    info = error_details_pb2.ErrorInfo.FromString(status.details[0].value)
    assert (info.reason, info.domain) == ("QUOTA_EXCEEDED", "manylora")
    assert dict(info.metadata) == {"tenant": "acme", "quotas": "classes.batch.token_bucket"}
    failure = error_details_pb2.QuotaFailure.FromString(status.details[1].value)
    assert [(v.subject, v.quota_value) for v in failure.violations] == [("tenant:acme", 500)]
    never = status_pb2.Status.FromString(encode_details(QuotaExceeded("never", breaches=[breach])))
    assert not any(detail.TypeName().endswith("RetryInfo") for detail in never.details)


async def test_a_repeated_key_is_no_way_to_say_two_things() -> None:
    """Whoever forwards a call behind metadata of its caller's, or before it, must not have half of it believed."""
    seen: list[str] = []

    async def note(request: Any, call: Any) -> Any:
        seen.append(call.metadata["x-tenant-id"])
        return text("")

    server = await GrpcTransport().serve("127.0.0.1:0", [echo_service(Unary=note)])
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            unary = channel.unary_unary("/manylora.test.EchoService/Unary")
            for values in (("acme",), ("acme", "birch"), ("birch", "acme")):
                await unary(b"", metadata=[("x-tenant-id", value) for value in values])
    finally:
        await server.stop(0)
    assert seen == ["acme", "acme, birch", "birch, acme"]
