"""What every transport does alike around a handler and a message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from manylora_shared.errors import (
    Code,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    ManyloraError,
    RpcError,
)
from manylora_shared.transport.base import Gate, ServerCall

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
REQUEST_TIMEOUT_S = 30.0  # from a call's beginning to the end of its single request, where a gate let it in
_MAX_LISTED_FIELDS = 1_000


def parse_request(message_type: type[Message], data: bytes) -> Message:
    """Raises InvalidRequest."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise InvalidRequest.of("request", f"the bytes received are not a {name} message") from None


class Admission:
    """A call's way past its service's gate, if there is one, to its parsed messages."""

    __slots__ = ("_hold", "_max_bytes", "_read", "_request_type")

    def __init__(
        self,
        gate: Gate | None,
        call: ServerCall,
        request_type: type[Message],
        read: Callable[[], Awaitable[bytes | None]],
    ) -> None:
        """read: the next message's bytes; None: there are no more. Raises what the gate raises; then `read` was not
        asked.
        """
        self._hold = gate.enter(call) if gate is not None else None
        self._max_bytes = gate.max_message_bytes if gate is not None else MAX_MESSAGE_BYTES
        self._request_type = request_type
        self._read = read

    @property
    def owner(self) -> str:
        """Of the key that came, if one did."""
        return self._hold.owner if self._hold is not None else ""

    def __aiter__(self) -> Admission:
        return self

    async def __anext__(self) -> Message:
        data = await self._read()
        if data is None:
            raise StopAsyncIteration
        if self._hold is not None:
            if len(data) > self._max_bytes:
                raise _too_large(self._request_type, data, self._max_bytes)
            await self._hold.before_parsing(len(data))
        return parse_request(self._request_type, data)

    async def single(self) -> Message:
        """The request of a call that has one."""
        if self._hold is None:
            return await anext(self)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await anext(self)
        except StopAsyncIteration:
            raise InvalidRequest.of("request", "the call ended without one") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the request was not there after {REQUEST_TIMEOUT_S:g} seconds") from None

    def end(self) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.release()


def _too_large(message_type: type[Message], data: bytes, max_bytes: int) -> InvalidRequest:
    """Names the largest field, unparsed."""
    sizes: dict[int, int] = {}
    for number, size_bytes in _fields(data):
        sizes[number] = sizes.get(number, 0) + size_bytes
    largest = max(sizes, key=sizes.__getitem__, default=0)
    field = message_type.DESCRIPTOR.fields_by_number.get(largest)
    if field is None:
        return InvalidRequest.of("request", f"has {len(data)} bytes; it has at most {max_bytes}")
    oneof = field.containing_oneof
    name = f"{oneof.name}.{field.name}" if oneof is not None else field.name
    return InvalidRequest.of(name, f"has {sizes[largest]} bytes; a request has at most {max_bytes} in all")


def _fields(data: bytes) -> Iterator[tuple[int, int]]:
    """Numbers of a message's first fields with their sizes in bytes (protobuf's wire format)."""
    at = 0
    for _ in range(_MAX_LISTED_FIELDS):
        if at >= len(data):
            return
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, end = _varint(data, at)
            case 1:
                end = at + 8
            case 2:
                size_bytes, at = _varint(data, at)
                end = at + size_bytes
            case 5:
                end = at + 4
            case _:
                return
        yield tag >> 3, min(end, len(data)) - at
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """And where it ends; one that is cut off is as if zeros followed."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at] if at < len(data) else 0
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, at


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
