"""Many calls over one stream: what all of them have to say at a time goes as one message.

A message costs gRPC in Python some tenths of a millisecond on either side, whatever is in it, and a worker's step makes
tokens for dozens of calls at once. So a `BundleChannel` carries calls that have one request and a stream of responses
over one `Carry` stream (bundle.proto) to a `BundleServer`, which runs them by the very handlers that would answer them
one by one. Either side writes when it can, and then all that has gathered since. Every other call goes as it is.

What a caller sees is the same but for one thing: a call is not a stream of gRPC's, so it has no flow control there.
Instead its server sends no more responses than the caller has given it credit for (`WINDOW`, and as many again as were
read). Calls end each by itself, with their own status; when the stream breaks, all of them end with its status.

Both ends belong to one event loop each.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from manylora.v1 import bundle_pb2

from manylora_shared.errors import Code, ManyloraError, Overloaded, RpcError, ServiceUnavailable
from manylora_shared.transport.base import (
    Channel,
    Method,
    Server,
    ServerCall,
    Service,
    Stream,
    Transport,
    methods_of,
)
from manylora_shared.transport.dispatch import (
    MAX_MESSAGE_BYTES,
    close_iterator,
    is_task_cancelled,
    parse_request,
    parse_response,
    status_of,
)
from manylora_shared.transport.status import decode_error, encode_details, message_of

_DESCRIPTOR = bundle_pb2.DESCRIPTOR.services_by_name["BundleService"]
_CARRY = methods_of(_DESCRIPTOR)["Carry"]

PartT = TypeVar("PartT", bundle_pb2.CallPart, bundle_pb2.AnswerPart)

WINDOW = 32
"""Responses of a call that may be under way or unread."""
MAX_CALLS = 16_384
"""Of one stream."""
_MAX_BUNDLE_BYTES = 256 * 1024
"""A bundle takes no further part once it has so much."""
_MAX_PART_BYTES = MAX_MESSAGE_BYTES - 64
"""So that a bundle of one part is a message that the other side takes."""


def _bundled(services: Iterable[ServiceDescriptor]) -> dict[str, Method]:
    """By path the methods with one request and a stream of responses."""
    found = [method for service in services for method in methods_of(service).values()]
    return {method.path: method for method in found if method.server_streaming and not method.client_streaming}


class _Outgoing(Generic[PartT]):
    """Parts on their way out, for one writer."""

    def __init__(self) -> None:
        self._parts: collections.deque[PartT] = collections.deque()
        self._is_closed = False
        self._news = asyncio.Event()

    def put(self, part: PartT) -> None:
        """After `close`: nothing."""
        if not self._is_closed:
            self._parts.append(part)
            self._news.set()

    def close(self) -> None:
        """Nothing follows what is there."""
        self._is_closed = True
        self._news.set()

    async def next(self) -> list[PartT] | None:
        """What has gathered, at least one part and as much as a bundle takes; None: nothing follows."""
        while not self._parts:
            if self._is_closed:
                return None
            self._news.clear()
            await self._news.wait()
        parts, num_bytes = [self._parts.popleft()], 0
        while self._parts:
            num_bytes += parts[-1].ByteSize()
            if num_bytes + self._parts[0].ByteSize() > _MAX_BUNDLE_BYTES:
                break
            parts.append(self._parts.popleft())
        return parts


# ---- the caller's side


class _Line:
    """One Carry stream and the calls on it. States: carrying, then broken (`error`)."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._outgoing: _Outgoing[bundle_pb2.CallPart] = _Outgoing()
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self.error: RpcError | None = None
        self._tasks = [
            asyncio.create_task(self._read_all(), name="bundle-read"),
            asyncio.create_task(self._write_all(), name="bundle-write"),
        ]

    def open(self, method: Method, request: bytes, metadata: Mapping[str, str]) -> _Call:
        self._last_id += 1
        call = self._calls[self._last_id] = _Call(self, self._last_id, method)
        opened = bundle_pb2.CallOpen(method=method.path, metadata=metadata, request=request, credit=WINDOW)
        self.send(bundle_pb2.CallPart(call=self._last_id, open=opened))
        return call

    def send(self, part: bundle_pb2.CallPart) -> None:
        self._outgoing.put(part)

    def forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    def close(self) -> None:
        """Ends the stream and every call."""
        self._break(RpcError(Code.CANCELLED, "the channel is closed"))

    async def wait_closed(self) -> None:
        await asyncio.wait(self._tasks)

    def _break(self, error: RpcError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._outgoing.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(error)
        self._stream.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _read_all(self) -> None:
        try:
            while (bundle := await self._stream.read()) is not None:
                for part in bundle.parts:
                    self._take(part)
            self._break(RpcError(Code.UNAVAILABLE, "the server has ended the stream of calls"))
        except RpcError as e:
            self._break(e)
        except Exception:
            self._break(RpcError(Code.INTERNAL, "the stream of calls said what it cannot say"))
            raise

    async def _write_all(self) -> None:
        try:
            while (parts := await self._outgoing.next()) is not None:
                await self._stream.write(bundle_pb2.CallBundle(parts=parts))
        except RpcError as e:
            self._break(e)

    def _take(self, part: bundle_pb2.AnswerPart) -> None:
        call = self._calls.get(part.call)
        if call is None:
            return  # it was cancelled here, and the server has not heard of it yet
        match part.WhichOneof("what"):
            case "response":
                call.put(part.response)
            case "end":
                end = part.end
                error = decode_error(Code(end.code), end.message, end.details) if end.code else None
                self.forget(part.call)
                call.end(error)
            case other:
                error = RpcError(Code.INTERNAL, f"a part of a bundle is {other or 'nothing'}, not a response or an end")
                self.forget(part.call)
                call.end(error)


class _Call:
    """transport.base.Stream for one call of a bundle."""

    __slots__ = ("_call_id", "_error", "_is_over", "_line", "_method", "_num_read", "_responses", "_waiting")

    def __init__(self, line: _Line, call_id: int, method: Method) -> None:
        self._line = line
        self._call_id = call_id
        self._method = method
        self._responses: collections.deque[bytes] = collections.deque()
        self._num_read = 0
        """Since credit was given last."""
        self._is_over = False
        self._error: RpcError | None = None
        self._waiting: asyncio.Future[None] | None = None

    # -- the line's

    def put(self, response: bytes) -> None:
        self._responses.append(response)
        self._wake()

    def end(self, error: RpcError | None) -> None:
        self._is_over = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- the caller's

    async def read(self) -> Any:
        while not self._responses:
            if self._is_over:
                if self._error is not None:
                    raise self._error.with_traceback(None)  # all calls of a broken line may share it
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiting = None
        response = self._responses.popleft()
        self._num_read += 1
        if self._num_read >= WINDOW // 2 and not self._is_over:
            self._line.send(bundle_pb2.CallPart(call=self._call_id, credit=self._num_read))
            self._num_read = 0
        return parse_response(self._method.response_type, response)

    async def write(self, message: Message) -> None:
        raise RpcError(Code.FAILED_PRECONDITION, "the call takes a single request")

    async def close_send(self) -> None:
        """There is nothing to close: its one request is sent."""

    def cancel(self) -> None:
        self._responses.clear()
        if self._is_over:
            if self._error is None:
                self._error = RpcError(Code.CANCELLED, "the call was cancelled")
            return
        self._line.forget(self._call_id)
        self._line.send(bundle_pb2.CallPart(call=self._call_id, cancel=True))
        self.end(RpcError(Code.CANCELLED, "the call was cancelled"))


class BundleChannel:
    """transport.base.Channel that bundles some calls. Owns `channel`.

    Args:
        paths: of the methods whose calls are bundled, unless they have a timeout: one request, a stream of responses.
    """

    def __init__(self, channel: Channel, paths: Collection[str]) -> None:
        self._channel = channel
        self._paths = paths
        self._line: _Line | None = None
        self._is_closed = False

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        return await self._channel.call(method, request, timeout=timeout, metadata=metadata)

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        if request is None or timeout is not None or method.path not in self._paths:
            return self._channel.stream(method, request, timeout=timeout, metadata=metadata)
        if self._is_closed:
            raise RpcError(Code.UNAVAILABLE, "the channel is closed")
        data = request.SerializeToString()
        if len(data) + 2 * sum(len(k) + len(v) + 8 for k, v in (metadata or {}).items()) > _MAX_PART_BYTES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"the request is longer than {_MAX_PART_BYTES} bytes")
        if self._line is None or self._line.error is not None:
            self._line = _Line(self._channel.stream(_CARRY))
        return self._line.open(method, data, metadata or {})

    async def close(self) -> None:
        self._is_closed = True
        if self._line is not None:
            self._line.close()
            await self._line.wait_closed()
        await self._channel.close()


# ---- the server's side


class _BundledCall:
    """transport.base.ServerCall."""

    __slots__ = ("metadata", "peer")

    def __init__(self, metadata: Mapping[str, str], peer: str) -> None:
        self.metadata = metadata
        self.peer = peer

    def time_remaining(self) -> float | None:
        return None


class _Run:
    """A call that is answered."""

    __slots__ = ("_more", "credit", "task")

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.task: asyncio.Task[None] | None = None
        self._more: asyncio.Future[None] | None = None

    def add(self, credit: int) -> None:
        self.credit += credit
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def spend(self) -> None:
        """Takes one; waits where there is none."""
        while self.credit <= 0:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        self.credit -= 1


class BundleServer:
    """Answers bundled calls of these services."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._handlers = {
            path: (method, service.handlers[path.rpartition("/")[2]])
            for service in services
            for path, method in _bundled([service.descriptor]).items()
        }
        self._lines: dict[_ServedLine, None] = {}
        self._is_ending = False

    def service(self) -> Service:
        return Service(_DESCRIPTOR, {"Carry": self._carry})

    def end(self) -> None:
        """Takes no further call; each stream ends with its last one."""
        self._is_ending = True
        for line in self._lines:
            line.end()

    async def _carry(self, bundles: AsyncIterator[bundle_pb2.CallBundle], call: ServerCall) -> AsyncIterator[Message]:
        line = _ServedLine(self._handlers, call.peer)
        self._lines[line] = None
        if self._is_ending:
            line.end()
        reader = asyncio.create_task(line.obey(bundles), name="bundle-obey")
        try:
            while (parts := await line.outgoing.next()) is not None:
                yield bundle_pb2.AnswerBundle(parts=parts)
        finally:
            del self._lines[line]
            reader.cancel()
            await line.stop()
            await asyncio.wait([reader])
        if not reader.cancelled():
            reader.result()


class _ServedLine:
    """One Carry stream at its server."""

    def __init__(self, handlers: Mapping[str, tuple[Method, Callable[..., Any]]], peer: str) -> None:
        self.outgoing: _Outgoing[bundle_pb2.AnswerPart] = _Outgoing()
        self._handlers = handlers
        self._peer = peer
        self._runs: dict[int, _Run] = {}
        self._is_ending = False

    async def obey(self, bundles: AsyncIterator[bundle_pb2.CallBundle]) -> None:
        """What the caller says, until it says no more: nobody reads the calls' answers then."""
        try:
            async for bundle in bundles:
                for part in bundle.parts:
                    self._take(part)
        finally:
            self.outgoing.close()

    def end(self) -> None:
        self._is_ending = True
        if not self._runs:
            self.outgoing.close()

    async def stop(self) -> None:
        """Cancels what runs, and waits for it."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _take(self, part: bundle_pb2.CallPart) -> None:
        call_id = part.call
        run = self._runs.get(call_id)
        match part.WhichOneof("what"):
            case "open" if run is None:
                run = self._runs[call_id] = _Run(part.open.credit)
                run.task = asyncio.create_task(self._run(call_id, part.open, run), name=f"bundled {part.open.method}")
                run.task.add_done_callback(lambda _: self._ended(call_id))
            case "credit" if run is not None:
                run.add(part.credit)
            case "cancel" if run is not None and run.task is not None:
                run.task.cancel()
            case "open":
                self._end(call_id, ServiceUnavailable(f"call {call_id} is open already"))

    async def _run(self, call_id: int, opened: bundle_pb2.CallOpen, run: _Run) -> None:
        responses: Any = None
        error: ManyloraError | None = None
        try:
            responses = self._answers(opened)
            async for response in responses:
                await run.spend()
                self.outgoing.put(bundle_pb2.AnswerPart(call=call_id, response=response.SerializeToString()))
        except Exception as e:
            error = status_of(opened.method, e)
        except asyncio.CancelledError as e:
            if is_task_cancelled():
                raise
            inner = RuntimeError("an inner task was cancelled")
            inner.__cause__ = e
            error = status_of(opened.method, inner)
        finally:
            if responses is not None:
                await close_iterator(responses)
        self._end(call_id, error)

    def _ended(self, call_id: int) -> None:
        del self._runs[call_id]
        if self._is_ending and not self._runs:
            self.outgoing.close()

    def _answers(self, opened: bundle_pb2.CallOpen) -> AsyncIterator[Message]:
        found = self._handlers.get(opened.method)
        if found is None:
            raise RpcError(Code.UNIMPLEMENTED, f"{opened.method[:200]} is not answered here")
        if self._is_ending:
            raise ServiceUnavailable("the server is stopping")
        if len(self._runs) > MAX_CALLS:  # this one is among them
            raise Overloaded(f"{MAX_CALLS} calls are under way here")
        method, handler = found
        request = parse_request(method.request_type, opened.request)
        answers: AsyncIterator[Message] = handler(request, _BundledCall(opened.metadata, self._peer)).__aiter__()
        return answers

    def _end(self, call_id: int, error: ManyloraError | None) -> None:
        end = bundle_pb2.CallEnd()
        if error is not None:
            end = bundle_pb2.CallEnd(code=int(error.code), message=message_of(error), details=encode_details(error))
        self.outgoing.put(bundle_pb2.AnswerPart(call=call_id, end=end))


# ---- transports


class BundlingTransport:
    """A transport whose channels bundle the calls of these services, on servers that take bundles."""

    def __init__(self, transport: Transport, services: Iterable[ServiceDescriptor]) -> None:
        self._transport = transport
        self._paths = frozenset(_bundled(services))

    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        return await self._transport.serve(address, services)

    def connect(self, address: str) -> Channel:
        return BundleChannel(self._transport.connect(address), self._paths)


class UnbundlingTransport:
    """A transport whose servers take calls of their services in bundles too."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        bundles = BundleServer(services)
        return _UnbundlingServer(await self._transport.serve(address, [*services, bundles.service()]), bundles)

    def connect(self, address: str) -> Channel:
        return self._transport.connect(address)


class _UnbundlingServer:
    def __init__(self, server: Server, bundles: BundleServer) -> None:
        self._server = server
        self._bundles = bundles

    @property
    def address(self) -> str:
        return self._server.address

    def set_serving(self, serving: bool) -> None:
        self._server.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        self._bundles.end()
        await self._server.stop(grace_s)
