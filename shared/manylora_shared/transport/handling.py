"""What every transport does alike around a handler and a message."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from google.protobuf.message import DecodeError, Message

from manylora_shared.errors import Code, FieldViolation, InternalError, InvalidRequest, ManyloraError, RpcError

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


def parse_request(message_type: type[Message], data: bytes) -> Message:
    """Raises InvalidRequest."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise InvalidRequest.of("request", f"the bytes received are not a {name} message") from None


def parse_response(message_type: type[Message], data: bytes) -> Message:
    """Raises RpcError(INTERNAL)."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise RpcError(Code.INTERNAL, f"the bytes received are not a {name} message") from None


def check_size(request: Message) -> None:
    """For who sends it: the other side could not say what of it is too long. Raises RpcError(INVALID_ARGUMENT)."""
    size_bytes = request.ByteSize()
    if size_bytes <= MAX_MESSAGE_BYTES:
        return
    field, field_bytes = _largest_field(request)
    told = f"has {field_bytes} bytes; a request has at most {MAX_MESSAGE_BYTES} in all"
    error = RpcError(Code.INVALID_ARGUMENT, f"{field}: {told}", violations=[FieldViolation(field, told)])
    error.label = InvalidRequest.label
    raise error


def _largest_field(message: Message) -> tuple[str, int]:
    """Its path, as deep as single messages go, and how many bytes it takes."""
    left = type(message)()
    left.CopyFrom(message)
    sizes: dict[str, int] = {}
    for descriptor, _ in message.ListFields():
        before = left.ByteSize()
        left.ClearField(descriptor.name)
        sizes[descriptor.name] = before - left.ByteSize()
    name = max(sizes, key=sizes.__getitem__)
    inner = getattr(message, name)
    if not isinstance(inner, Message):
        return name, sizes[name]
    path, size_bytes = _largest_field(inner)
    return f"{name}.{path}", size_bytes


def error_of(path: str, raised: BaseException) -> ManyloraError:
    """What is not of our tree is logged and stays here. Raises the CancelledError where the running task was asked to
    stop. One that came out of an inner task is a bug.
    """
    if isinstance(raised, ManyloraError):
        return raised
    if isinstance(raised, asyncio.CancelledError) and is_task_cancelled():
        raise raised
    _LOG.error("handler of %s failed", path, exc_info=raised)
    return InternalError("internal error")


def is_task_cancelled() -> bool:
    """As against a CancelledError that came out of an inner call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def close_iterator(iterator: Any) -> None:
    """Runs the `finally` blocks of a response iterator that was left early."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()
