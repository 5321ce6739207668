"""A service with all four kinds of calls, built here so that the transport's tests depend on no service of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from manylora_shared.transport.base import Method, Service, methods_of

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_OPTIONAL = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL


def _build() -> ServiceDescriptor:
    file = descriptor_pb2.FileDescriptorProto(name="manylora/test/echo.proto", package="manylora.test", syntax="proto3")
    message = file.message_type.add(name="Text")
    message.field.add(name="text", number=1, type=_STRING, label=_OPTIONAL)
    service = file.service.add(name="EchoService")
    for name, client_streaming, server_streaming in (
        ("Unary", False, False),
        ("ServerStream", False, True),
        ("ClientStream", True, False),
        ("Bidi", True, True),
    ):
        service.method.add(
            name=name,
            input_type=".manylora.test.Text",
            output_type=".manylora.test.Text",
            client_streaming=client_streaming,
            server_streaming=server_streaming,
        )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName("manylora.test.EchoService")


DESCRIPTOR = _build()
METHODS: dict[str, Method] = methods_of(DESCRIPTOR)
_TEXT = GetMessageClass(DESCRIPTOR.file.message_types_by_name["Text"])


def text(value: str) -> Message:
    return _TEXT(text=value)


async def _unary(request: Any, call: Any) -> Message:
    return text(request.text)


async def _server_stream(request: Any, call: Any) -> Any:
    for part in request.text.split(","):
        yield text(part)


async def _client_stream(requests: Any, call: Any) -> Message:
    return text(",".join([r.text async for r in requests]))


async def _bidi(requests: Any, call: Any) -> Any:
    async for request in requests:
        yield text(request.text)


def echo_service(**handlers: Callable[..., Any]) -> Service:
    """The echo service, with some handlers replaced."""
    defaults: dict[str, Callable[..., Any]] = {
        "Unary": _unary,
        "ServerStream": _server_stream,
        "ClientStream": _client_stream,
        "Bidi": _bidi,
    }
    return Service(DESCRIPTOR, {**defaults, **handlers})
