"""Client streams over gRPC that the server answers or refuses while requests are still being sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from manylora.v1 import admin_pb2
from manylora_shared.errors import AlreadyExists, Code, RpcError
from manylora_shared.transport.base import ServerCall, Service, methods_of
from manylora_shared.transport.grpc_transport import GrpcChannel, GrpcTransport

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
ADD = methods_of(ADMIN)["AddAdapter"]
CHUNK = admin_pb2.AddAdapterRequest(chunk=admin_pb2.FileChunk(file_name="f", data=bytes(1_000_000)))


async def add(requests: AsyncIterator[admin_pb2.AddAdapterRequest], call: ServerCall) -> admin_pb2.AddAdapterResponse:
    header = (await anext(requests)).header
    if header.name == "taken":
        raise AlreadyExists("taken: exists")
    return admin_pb2.AddAdapterResponse(adapter=admin_pb2.AdapterInfo(name=header.name))


async def unused(request: Any, call: ServerCall) -> Any:
    raise AssertionError


@pytest.fixture
async def channel() -> AsyncIterator[GrpcChannel]:
    handlers = {m.name: unused for m in ADMIN.methods} | {"AddAdapter": add}
    transport = GrpcTransport()
    server = await transport.serve("127.0.0.1:0", [Service(ADMIN, handlers)])
    channel = transport.connect(server.address)
    yield channel
    await channel.close()
    await server.stop(0)


def header(name: str) -> admin_pb2.AddAdapterRequest:
    return admin_pb2.AddAdapterRequest(header=admin_pb2.AddAdapterHeader(name=name))


async def test_the_answer_is_kept_for_a_late_reader(channel: GrpcChannel) -> None:
    stream = channel.stream(ADD)
    await stream.write(header("free"))
    await stream.close_send()
    await asyncio.sleep(0.05)
    assert (await stream.read()).adapter.name == "free"
    assert await stream.read() is None


@pytest.mark.parametrize("attempt", range(5))
async def test_a_refusal_in_mid_upload_keeps_its_status(channel: GrpcChannel, attempt: int) -> None:
    stream = channel.stream(ADD)
    await stream.write(header("taken"))
    with pytest.raises(RpcError, match="taken: exists") as failure:  # noqa: PT012
        for _ in range(200):
            await stream.write(CHUNK)
    assert failure.value.code is Code.ALREADY_EXISTS
    with pytest.raises(RpcError, match="taken: exists"):
        await stream.write(CHUNK)
    with pytest.raises(RpcError, match="taken: exists"):
        await stream.read()
