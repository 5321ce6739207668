"""What every transport does alike around a handler and a message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
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
from manylora_shared.metadata import TRACEPARENT_KEY
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Hold, ServerCall, Service
from manylora_shared.transport.unparsed import LARGE_BYTES, check_fields, no_message, too_large

Read = Callable[[], Awaitable[bytes | None]]

_LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
REQUEST_TIMEOUT_S = 30.0  # from a call's beginning to the end of its single request, where a gate let it in
SLOW_S = 1.0
REFUSAL_DELAY_S = 0.5  # of what came too fast: who sends it again at once is to send less
MAX_FIELDS = 5_120  # of a large message: the messages of a chat, and a thousand more


def parse_request(message_type: type[Message], data: bytes) -> Message:
    """Raises InvalidRequest."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise no_message(message_type) from None


class _Late:
    """A message that is not there after SLOW_S."""

    def __init__(self, hold: Hold) -> None:
        self.refusal: ManyloraError | None = None
        self.leave: Callable[[], None] = lambda: None
        self._hold = hold

    def is_so(self, limit: asyncio.Timeout) -> None:
        try:
            self.leave = self._hold.slow()
        except ManyloraError as refusal:
            self.refusal = refusal
            limit.reschedule(0.0)


class Admission:
    """A call's way past its service's gate, if there is one, to its parsed messages."""

    __slots__ = ("_hold", "_max_bytes", "_read", "_request_type")

    def __init__(
        self,
        enter: Callable[[], Hold] | None,
        max_bytes: int,
        call: ServerCall,
        request_type: type[Message],
        read: Read,
        check: Callable[[ServerCall], None] | None = None,
    ) -> None:
        """enter: the gate's. read: the next message's bytes; None: there are no more. check: the service's. Raises what
        enter and check raise; then `read` was not asked.
        """
        if check is not None:
            check(call)
        self._hold = enter() if enter is not None else None
        self._max_bytes = max_bytes
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
        return await self._parsed(data)

    async def single(self) -> Message:
        """The request of a call that has one."""
        data = await (self._read() if self._hold is None else self._read_in_time(self._hold))
        if data is None:
            raise InvalidRequest.of("request", "the call ended without one")
        return await self._parsed(data)

    async def _parsed(self, data: bytes) -> Message:
        if (hold := self._hold) is not None:
            size_bytes = len(data)
            refusal: ManyloraError | None = None
            if size_bytes > self._max_bytes:
                refusal = too_large(self._request_type, data, self._max_bytes)
                data = b""  # neither a wait nor a traceback keeps it
            try:
                await hold.before_parsing(size_bytes)
            except ManyloraError as e:
                refusal = refusal or e
                data = b""
                await asyncio.sleep(REFUSAL_DELAY_S)
            if refusal is not None:
                raise refusal
            if size_bytes > LARGE_BYTES:
                check_fields(self._request_type, data, MAX_FIELDS)
        return parse_request(self._request_type, data)

    async def _read_in_time(self, hold: Hold) -> bytes | None:
        late = _Late(hold)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S) as limit:
                timer = asyncio.get_running_loop().call_later(SLOW_S, late.is_so, limit)
                try:
                    data = await self._read()
                finally:
                    timer.cancel()
                    late.leave()
        except TimeoutError:
            timed_out = DeadlineExceeded(f"the request was not there after {REQUEST_TIMEOUT_S:g} seconds")
            raise late.refusal or timed_out from None
        return data

    def end(self) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.release()


async def admitted(service: Service, call: ServerCall, request_type: type[Message], read: Read) -> Admission:
    """In its turn. Raises what gate and check raise, once that may be told."""
    gate = service.gate
    if gate is None:
        return Admission(None, MAX_MESSAGE_BYTES, call, request_type, read, service.check)
    enter = await gate.before_entering(call)
    try:
        return Admission(enter, gate.max_message_bytes, call, request_type, read, service.check)
    except ManyloraError as e:
        await gate.before_refusal(call, e)
        raise


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


def error_of(path: str, raised: BaseException, metadata: Mapping[str, str] | None = None) -> ManyloraError:
    """What is not of our tree is logged, with the call's trace, and stays here. Raises the CancelledError where the
    running task was asked to stop. One that came out of an inner task is a bug.
    """
    if isinstance(raised, ManyloraError):
        return raised
    if isinstance(raised, asyncio.CancelledError) and is_task_cancelled():
        raise raised
    traceparent = (metadata or {}).get(TRACEPARENT_KEY, "")
    _LOG.error("handler of %s failed", path, exc_info=raised, extra=fields(traceparent=traceparent))
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
