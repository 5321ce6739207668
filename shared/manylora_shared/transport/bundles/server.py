"""The server's side of bundles (bundle.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from manylora.v1 import bundle_pb2

from manylora_shared.errors import Code, ManyloraError, Overloaded, RpcError, ServiceUnavailable
from manylora_shared.transport.base import Channel, Method, Server, ServerCall, Service, Transport
from manylora_shared.transport.bundles.messages import DESCRIPTOR, Outgoing, bundled_methods
from manylora_shared.transport.handling import close_iterator, error_of, parse_request
from manylora_shared.transport.status import encode_details, message_of

MAX_CALLS = 16_384
_PARTS_AT_ONCE = 128  # that are obeyed before others have their turn on the event loop


class UnbundlingTransport:
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


class _BundledCall:
    """transport.base.ServerCall"""

    __slots__ = ("metadata", "peer")

    def __init__(self, metadata: Mapping[str, str], peer: str) -> None:
        self.metadata = metadata
        self.peer = peer

    def time_remaining(self) -> float | None:
        return None


class _Run:
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
        while self.credit <= 0:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        self.credit -= 1


class BundleServer:
    def __init__(self, services: Sequence[Service]) -> None:
        self._handlers = {
            path: (method, service.handlers[path.rpartition("/")[2]])
            for service in services
            for path, method in bundled_methods([service.descriptor]).items()
        }
        self._checks = [service.check for service in services if service.check is not None]
        self._lines: dict[_ServedLine, None] = {}
        self._is_ending = False

    def service(self) -> Service:
        return Service(DESCRIPTOR, {"Carry": self._carry})

    def end(self) -> None:
        """Takes no further call; each stream ends with its last one."""
        self._is_ending = True
        for line in self._lines:
            line.end()

    async def _carry(self, bundles: AsyncIterator[bundle_pb2.CallBundle], call: ServerCall) -> AsyncIterator[Message]:
        for check in self._checks:
            check(call)  # before anything is read: a single message may open very many calls
        line = _ServedLine(self._handlers, call.peer)
        self._lines[line] = None
        if self._is_ending:
            line.end()
        reader = asyncio.create_task(line.obey(bundles), name="bundle-obey")
        try:
            while (parts := await line.next()) is not None:
                yield bundle_pb2.AnswerBundle(parts=parts)
        finally:
            del self._lines[line]
            reader.cancel()
            await line.stop()
            await asyncio.wait([reader])
        if not reader.cancelled():
            reader.result()


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


class _ServedLine:
    """One Carry stream."""

    def __init__(self, handlers: Mapping[str, tuple[Method, Callable[..., Any]]], peer: str) -> None:
        self.outgoing: Outgoing[bundle_pb2.AnswerPart] = Outgoing()
        self._handlers = handlers
        self._peer = peer
        self._runs: dict[int, _Run] = {}
        self._is_ending = False
        self._ahead = 0
        self._num_unread = 0
        self._was_read = asyncio.Event()

    async def next(self) -> list[bundle_pb2.AnswerPart] | None:
        """What the next bundle says, once there is room for it; None: nothing follows."""
        while self._ahead and self._num_unread >= self._ahead:
            self._was_read.clear()
            await self._was_read.wait()
        self._num_unread += 1
        return await self.outgoing.next()

    async def obey(self, bundles: AsyncIterator[bundle_pb2.CallBundle]) -> None:
        try:
            async for bundle in bundles:
                for index, part in enumerate(bundle.parts, 1):
                    self._take(part)
                    if index % _PARTS_AT_ONCE == 0:
                        await asyncio.sleep(0)
        finally:
            self._ahead = 0  # nobody will say that more was read
            self._was_read.set()
            self.outgoing.close()

    def end(self) -> None:
        self._is_ending = True
        if not self._runs:
            self.outgoing.close()

    async def stop(self) -> None:
        """Cancels what runs, and waits for it.

        The stream's end may be heard of just before its cancellation: that comes while this waits, and is raised behind
        it. Further ones end the waiting.
        """
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        own = asyncio.current_task()
        assert own is not None
        is_first = not own.cancelling()
        try:
            await _ended(tasks)
        except asyncio.CancelledError:
            if is_first:
                await _ended(tasks)
            raise

    def _take(self, part: bundle_pb2.CallPart) -> None:
        call_id = part.call
        run = self._runs.get(call_id)
        match part.WhichOneof("what"):
            case "open" if run is None and len(self._runs) >= MAX_CALLS:
                self._end(call_id, Overloaded(f"{MAX_CALLS} calls are under way here"))
            case "open" if run is None:
                run = self._runs[call_id] = _Run(part.open.credit)
                run.task = asyncio.create_task(self._run(call_id, part.open, run), name=f"bundled {part.open.method}")
                run.task.add_done_callback(lambda _: self._ended(call_id))
            case "bundles_ahead":
                self._ahead = part.bundles_ahead
            case "bundles_read":
                self._num_unread = max(0, self._num_unread - part.bundles_read)
                self._was_read.set()
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
        except (Exception, asyncio.CancelledError) as e:
            error = error_of(opened.method, e, opened.metadata)
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
        method, handler = found
        request = parse_request(method.request_type, opened.request)
        answers: AsyncIterator[Message] = handler(request, _BundledCall(opened.metadata, self._peer)).__aiter__()
        return answers

    def _end(self, call_id: int, error: ManyloraError | None) -> None:
        end = bundle_pb2.CallEnd()
        if error is not None:
            end = bundle_pb2.CallEnd(code=int(error.code), message=message_of(error), details=encode_details(error))
        self.outgoing.put(bundle_pb2.AnswerPart(call=call_id, end=end))
