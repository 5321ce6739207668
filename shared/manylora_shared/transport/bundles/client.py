"""The caller's side of bundles (bundle.py)."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from manylora.v1 import bundle_pb2

from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.base import Channel, Method, Server, Service, Stream, Transport
from manylora_shared.transport.bundles.messages import AHEAD, CARRY, MAX_PART_BYTES, WINDOW, Outgoing, bundled_methods
from manylora_shared.transport.handling import parse_response
from manylora_shared.transport.status import decode_error


class BundlingTransport:
    """line_keys: what the stream of bundles shows, besides its calls, of the metadata of the call that opens it."""

    def __init__(
        self, transport: Transport, services: Iterable[ServiceDescriptor], *, line_keys: Collection[str] = ()
    ) -> None:
        self._transport = transport
        self._line_keys = line_keys
        self._paths = frozenset(bundled_methods(services))

    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        return await self._transport.serve(address, services)

    def connect(self, address: str) -> Channel:
        return BundleChannel(self._transport.connect(address), self._paths, self._line_keys)


class _Line:
    """One Carry stream and the calls on it. States: carrying, then broken (`error`)."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._outgoing: Outgoing[bundle_pb2.CallPart] = Outgoing()
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._num_read = 0  # bundles, that the server was not told of
        self.send(bundle_pb2.CallPart(bundles_ahead=AHEAD))
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
                self._num_read += 1
                if self._num_read >= AHEAD // 2:
                    self.send(bundle_pb2.CallPart(bundles_read=self._num_read))
                    self._num_read = 0
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
    """transport.base.Stream"""

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

    @property
    def has_message(self) -> bool:
        return bool(self._responses)

    async def write(self, message: Message) -> None:
        raise RpcError(Code.FAILED_PRECONDITION, "the call takes a single request")

    async def close_send(self) -> None:
        """Its one request is sent."""

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
    """Owns `channel`.

    Args:
        paths: of the methods whose calls without a timeout are bundled.
        line_keys: as of `BundlingTransport`.
    """

    def __init__(self, channel: Channel, paths: Collection[str], line_keys: Collection[str]) -> None:
        self._channel = channel
        self._paths = paths
        self._line_keys = line_keys
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
        if len(data) + 2 * sum(len(k) + len(v) + 8 for k, v in (metadata or {}).items()) > MAX_PART_BYTES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"the request is longer than {MAX_PART_BYTES} bytes")
        if self._line is None or self._line.error is not None:
            shown = {key: value for key, value in (metadata or {}).items() if key in self._line_keys}
            self._line = _Line(self._channel.stream(CARRY, metadata=shown))
        return self._line.open(method, data, metadata or {})

    async def close(self) -> None:
        self._is_closed = True
        if self._line is not None:
            self._line.close()
            await self._line.wait_closed()
        await self._channel.close()
