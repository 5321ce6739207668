"""The transport of the simulation: services and callers in one event loop, with seeded delay and injected faults.

`MemoryNetwork` owns the listeners, the links and what is wrong with them. A call owns two pipes, one in each direction,
in which bytes travel in order, each item with a delay of its own; what arrives is parsed anew, so that no object is
shared. A pipe holds WINDOW_BYTES that were not read; then its writer waits.

What can be made to go wrong: `partition` stalls one direction between two nodes, and calls over it break on each end
when that end would have missed a ping (DETECT_MIN_S to DETECT_MAX_S); `drop_connections` breaks them at once; `kill`
takes a node away. What a caller sees of all this is what it sees of gRPC: tests/shared/test_transport_contract.py.

Every decision is a function of the calls, of the loop's time and of `rng`. Deliveries and timers run in the network's
own context, so that they belong to no simulated process; handlers run in the context in which their server was made.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from manylora_shared.errors import Code, ManyloraError, RpcError
from manylora_shared.transport.address import join_address, parse_address
from manylora_shared.transport.base import Method, Service, methods_of
from manylora_shared.transport.dispatch import (
    MAX_MESSAGE_BYTES,
    close_iterator,
    is_task_cancelled,
    parse_request,
    parse_response,
    status_of,
)
from manylora_shared.transport.health import Health
from manylora_shared.transport.status import decode_error, encode_details, message_of

WINDOW_BYTES = 64 * 1024
DETECT_MIN_S = 2.0
DETECT_MAX_S = 3.0
"""A silent peer is noticed between one missed ping's timeout and that plus the time between pings."""
RETRANSMIT_S = 0.2
"""How often what cannot wait in a pipe is tried again while the way is blocked."""
_FIRST_PORT = 40_000


class _End:
    """The last item of a pipe: half-close (no error) or the call's status."""

    __slots__ = ("error",)

    def __init__(self, error: tuple[Code, str, bytes] | None = None) -> None:
        self.error = error


_OK = _End()


class _Pipe:
    """One direction of one call: in transit, then arrived. One reader and one writer."""

    def __init__(self, network: MemoryNetwork, source: MemoryTransport, target: MemoryTransport) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._in_transit: deque[bytes | _End] = deque()
        self._arrived: deque[bytes | _End] = deque()
        self._last_arrival = 0.0
        self._due = 0
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._broken: _End | None = None
        self._silent = False
        self.on_end: Callable[[_End], None] | None = None
        """Called when an _End arrives, read or not."""

    @property
    def broken(self) -> _End | None:
        return self._broken

    def send(self, item: bytes | _End) -> None:
        """Puts an item on its way. Not bounded: `room` is what waits."""
        if self._broken is not None or self._silent:
            return
        if isinstance(item, bytes):
            self._unread_bytes += len(item)
        self._in_transit.append(item)
        self._last_arrival = max(self._last_arrival, self._network.now() + self._network.draw_delay_s())
        self._network.at(self._last_arrival, self._arrive)

    async def room(self) -> None:
        """Waits until a writer may send. Returns at once where the pipe is broken."""
        while self._unread_bytes >= WINDOW_BYTES and self._broken is None:
            self._writer = self._network.future()
            await self._writer

    async def receive(self) -> bytes | _End:
        """The next item; the last one again and again."""
        while not self._arrived:
            if self._broken is not None:
                return self._broken
            assert self._reader is None or self._reader.done(), "one reader at most"
            self._reader = self._network.future()
            await self._reader
        item = self._arrived[0]
        if isinstance(item, bytes):
            self._arrived.popleft()
            self._unread_bytes -= len(item)
            _wake(self._writer)
        return item

    def break_off(self, end: _End) -> None:
        """Nothing more arrives: the reader gets `end` next, the writer goes on into the void."""
        if self._broken is None:
            self._broken = end
            self._in_transit.clear()
            self._arrived.clear()
            _wake(self._reader)
            _wake(self._writer)

    def fall_silent(self) -> None:
        """The writer's node is gone: nothing that it has sent or will send arrives; the reader waits."""
        self._silent = True
        self._in_transit.clear()

    def flush(self) -> None:
        """After a stall: what is due arrives."""
        while self._due and self._in_transit and not self._network.is_blocked(self._source, self._target):
            self._due -= 1
            item = self._in_transit.popleft()
            self._arrived.append(item)
            _wake(self._reader)
            if isinstance(item, _End) and self.on_end is not None:
                self.on_end(item)

    def _arrive(self) -> None:
        self._due += 1
        self.flush()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class _Call:
    """One call, as the network sees it: two ends, two pipes, and what ends it.

    The client's end is over once `client_end` is set. The server's end lives while `handler` does.
    """

    def __init__(self, network: MemoryNetwork, client: MemoryTransport, server: MemoryTransport) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.requests = _Pipe(network, client, server)
        self.responses = _Pipe(network, server, client)
        self.responses.on_end = self.requests.break_off  # once the call is over nobody reads requests
        self.client_end: _End | None = None
        self.handler: asyncio.Task[None] | None = None
        self.server_gone = False
        self.timers: list[asyncio.TimerHandle] = []

    def end_client(self, end: _End) -> None:
        """The client's end is over; nothing is told to the server."""
        if self.client_end is None:
            self.client_end = end
            self.responses.break_off(end)
            self.requests.break_off(end)
            self._close_if_over()

    def end_server(self) -> None:
        """The server's end is over: its handler is cancelled if it still runs."""
        if not self.server_gone:
            self.server_gone = True
            if self.handler is not None and not self.handler.done():
                self.handler.cancel()
            self._close_if_over()

    def finish_server(self, end: _End) -> None:
        """The handler ended; its status travels."""
        if not self.server_gone:
            self.server_gone = True
            self.responses.send(end)
            self._close_if_over()

    def tell_server(self) -> None:
        """The client gave up: the server hears of it when the way is free, or misses its pings."""
        self.network.deliver(self.client, self.server, self.end_server)

    def tell_client(self) -> None:
        """The server's end closed the connection: the client hears of it when the way is free, or misses its pings."""
        self.network.deliver(self.server, self.client, self._reset_client)

    def miss_pings(self, *, at_client: bool) -> None:
        """One end notices that the other is silent, and closes the connection."""
        if at_client and self.client_end is None:
            self.end_client(_unavailable("ping timeout"))
            self.tell_server()
        elif not at_client and not self.server_gone:
            self.end_server()
            self.tell_client()

    def _reset_client(self) -> None:
        self.end_client(_unavailable("the connection was reset"))

    def _close_if_over(self) -> None:
        if self.server_gone and self.client_end is not None:
            for timer in self.timers:
                timer.cancel()
            self.network.forget(self)


class MemoryNetwork:
    """All nodes' network.

    Args:
        rng: draws the delay of each message and the moments at which faults are noticed.
        min_delay_s, max_delay_s: of one message on its way.
    """

    def __init__(self, rng: random.Random, *, min_delay_s: float = 0.0002, max_delay_s: float = 0.002) -> None:
        self._rng = rng
        self._min_delay_s = min_delay_s
        self._max_delay_s = max_delay_s
        self._next_port = _FIRST_PORT
        self._listeners: dict[str, MemoryServer] = {}
        self._transports: dict[MemoryTransport, None] = {}
        self._calls: dict[_Call, None] = {}
        self._blocked: dict[tuple[str, str], int] = {}
        self._partitions = 0
        self._context = contextvars.copy_context()

    def transport(self, node_name: str) -> MemoryTransport:
        """The network as one node (one incarnation of it) sees it."""
        transport = MemoryTransport(self, node_name)
        self._transports[transport] = None
        return transport

    @property
    def open_calls(self) -> int:
        """Calls of which an end is not over: 0 when everything is at rest."""
        return len(self._calls)

    def partition(self, source: str, target: str, *, both_ways: bool = True) -> None:
        """Nothing gets from `source` to `target` until `heal`."""
        for pair in [(source, target), (target, source)] if both_ways else [(source, target)]:
            if pair not in self._blocked:
                self._partitions += 1
                self._blocked[pair] = self._partitions
        for call in list(self._calls):
            self.watch_stall(call)

    def heal(self) -> None:
        """Ends all partitions. What is in transit and not given up arrives."""
        self._blocked.clear()
        for call in list(self._calls):
            call.requests.flush()
            call.responses.flush()

    def drop_connections(self, one: str, other: str) -> None:
        """Breaks every call between two nodes: both ends notice at once."""
        for call in list(self._calls):
            if {call.client.node_name, call.server.node_name} == {one, other}:
                call.end_server()
                call.end_client(_unavailable("the connection was reset"))

    def kill(self, node_name: str, *, silently: bool = False) -> None:
        """The node is gone: its listeners vanish, its handlers are cancelled, nothing that it sends arrives.

        Args:
            silently: its peers notice by missed pings (the machine died) and not by a reset (the process died).
        """
        for transport in [t for t in self._transports if t.node_name == node_name]:
            transport.is_dead = True
            del self._transports[transport]
        for address in [a for a, listener in self._listeners.items() if listener.node_name == node_name]:
            self._listeners.pop(address).vanish()
        for call in list(self._calls):
            delay_s = self.draw_detection_s() if silently else self.draw_delay_s()
            if call.server.node_name == node_name:
                call.responses.fall_silent()
                call.end_server()
                self.after(delay_s, call.end_client, _unavailable("the connection was lost"))
            if call.client.node_name == node_name:
                call.end_client(_unavailable("this node is dead"))
                self.after(delay_s, call.end_server)

    # ---- for the calls of this module

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def at(self, when: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when, callback, *args, context=self._context)

    def after(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self.at(self.now() + delay_s, callback, *args)

    def draw_delay_s(self) -> float:
        return self._rng.uniform(self._min_delay_s, self._max_delay_s)

    def draw_detection_s(self) -> float:
        return self._rng.uniform(DETECT_MIN_S, DETECT_MAX_S)

    def deliver(self, source: MemoryTransport, target: MemoryTransport, action: Callable[[], None]) -> None:
        """Runs `action` after a message's delay, or later, when the way is free."""
        self.after(self.draw_delay_s(), self._deliver, source, target, action)

    def _deliver(self, source: MemoryTransport, target: MemoryTransport, action: Callable[[], None]) -> None:
        if self.is_blocked(source, target):
            self.after(RETRANSMIT_S, self._deliver, source, target, action)
        else:
            action()

    def is_blocked(self, source: MemoryTransport, target: MemoryTransport) -> bool:
        return (source.node_name, target.node_name) in self._blocked

    def listener(self, address: str) -> MemoryServer | None:
        return self._listeners.get(address)

    def listen(self, address: str, server: MemoryServer) -> None:
        self._listeners[address] = server

    def unlisten(self, address: str) -> None:
        self._listeners.pop(address, None)

    def bind(self, address: str) -> str:
        """The address to listen on, with its port. Raises OSError, ValueError."""
        host, port = parse_address(address)
        if port == 0:
            self._next_port += 1
            port = self._next_port
        bound = join_address(host, port)
        if bound in self._listeners:
            raise OSError(f"cannot listen on {bound}: the address is in use")
        return bound

    def open(self, call: _Call) -> None:
        self._calls[call] = None
        self.watch_stall(call)

    def forget(self, call: _Call) -> None:
        self._calls.pop(call, None)

    def watch_stall(self, call: _Call) -> None:
        """Where a direction of the call is blocked, both ends will miss their pings: each at a moment of its own."""
        marks = self._marks(call)
        if any(marks):
            for at_client in (False, True):
                self.after(self.draw_detection_s(), self._notice_stall, call, marks, at_client)

    def _marks(self, call: _Call) -> tuple[int, int]:
        one, other = call.client.node_name, call.server.node_name
        return self._blocked.get((one, other), 0), self._blocked.get((other, one), 0)

    def _notice_stall(self, call: _Call, marks: tuple[int, int], at_client: bool) -> None:
        if all(mark == 0 or mark == now for mark, now in zip(marks, self._marks(call), strict=True)):
            call.miss_pings(at_client=at_client)


def _unavailable(message: str) -> _End:
    return _failed(RpcError(Code.UNAVAILABLE, message))


def _failed(error: ManyloraError) -> _End:
    return _End((error.code, message_of(error), encode_details(error)))


class _Requests:
    """The requests of a client stream, as a handler sees them."""

    def __init__(self, pipe: _Pipe, request_type: type[Message]) -> None:
        self._pipe = pipe
        self._request_type = request_type

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Message:
        item = await self._pipe.receive()
        if isinstance(item, _End):
            raise StopAsyncIteration
        return parse_request(self._request_type, item)


class _ServerCall:
    """transport.base.ServerCall."""

    def __init__(self, metadata: Mapping[str, str], peer: str, deadline: float | None) -> None:
        self._metadata = metadata
        self._peer = peer
        self._deadline = deadline

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._metadata

    @property
    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())


class MemoryServer:
    """A listener. States: serving, stopped (or vanished with its node)."""

    def __init__(self, transport: MemoryTransport, address: str, services: Sequence[Service]) -> None:
        self._transport = transport
        self._network = transport.network
        self._address = address
        self._health = Health([service.descriptor.full_name for service in services])
        self._methods: dict[str, tuple[Method, Callable[..., Any]]] = {
            method.path: (method, service.handlers[name])
            for service in (*services, self._health.service())
            for name, method in methods_of(service.descriptor).items()
        }
        self._calls: dict[_Call, None] = {}
        self._context = contextvars.copy_context()
        self._stopping = False

    @property
    def address(self) -> str:
        return self._address

    @property
    def node_name(self) -> str:
        return self._transport.node_name

    @property
    def transport(self) -> MemoryTransport:
        return self._transport

    def set_serving(self, serving: bool) -> None:
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Also waits for the `finally` blocks of the handlers that it cancels."""
        self._health.set_serving(False)
        if not self._stopping:
            self._stopping = True
            self._network.unlisten(self._address)
        tasks = [call.handler for call in self._calls if call.handler is not None]
        tasks = [task for task in tasks if task is not asyncio.current_task()]
        if tasks and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)
        for call in list(self._calls):
            if call.handler in tasks:
                call.responses.send(_unavailable("the server stopped"))
                call.end_server()
        if tasks:
            await asyncio.wait(tasks)

    def vanish(self) -> None:
        """The node is gone; its calls are ended by the network."""
        self._stopping = True

    def accept(self, call: _Call, path: str, metadata: Mapping[str, str], timeout: float | None) -> None:
        """A call has arrived."""
        if self._stopping:
            call.finish_server(_unavailable("the server stopped"))
            return
        found = self._methods.get(path)
        if found is None:
            call.finish_server(_End((Code.UNIMPLEMENTED, f"unknown method {path}", b"")))
            return
        deadline: float | None = None
        if timeout is not None:
            deadline = self._network.now() + timeout
            call.timers.append(self._network.at(deadline, call.end_server))
        server_call = _ServerCall(metadata, f"memory:{call.client.node_name}", deadline)
        self._calls[call] = None
        call.handler = asyncio.get_running_loop().create_task(
            self._handle(call, *found, server_call), context=self._context.copy()
        )

    async def _handle(self, call: _Call, method: Method, handler: Callable[..., Any], server_call: _ServerCall) -> None:
        end = _OK
        try:
            await self._run(call, method, handler, server_call)
        except Exception as e:
            end = _failed(status_of(method.path, e))
        except asyncio.CancelledError as e:
            if is_task_cancelled():
                raise
            stray = RuntimeError("an inner task was cancelled")
            stray.__cause__ = e
            end = _failed(status_of(method.path, stray))
        finally:
            self._calls.pop(call, None)
        call.finish_server(end)

    async def _run(self, call: _Call, method: Method, handler: Callable[..., Any], server_call: _ServerCall) -> None:
        request: Any = _Requests(call.requests, method.request_type)
        if not method.client_streaming:
            request = await anext(request)
        if not method.server_streaming:
            await self._send(call, await handler(request, server_call))
            return
        responses = handler(request, server_call)
        try:
            async for response in responses:
                await self._send(call, response)
        finally:
            await close_iterator(responses)

    async def _send(self, call: _Call, response: Message) -> None:
        data = response.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"a response of {len(data)} bytes is over the limit")
        call.responses.send(data)
        await call.responses.room()
        if call.client_end is not None:
            await self._network.future()  # nobody reads any more: the cancellation is on its way


class MemoryStream:
    """The client's end of a call."""

    def __init__(self, call: _Call, method: Method) -> None:
        self._call = call
        self._method = method
        self._sending_closed = not method.client_streaming
        self._read_one = False

    async def read(self) -> Any:
        try:
            item = await self._call.responses.receive()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, bytes):
            return parse_response(self._method.response_type, item)
        self._call.end_client(item)
        if item.error is not None:
            raise decode_error(*item.error)
        return None

    async def write(self, message: Message) -> None:
        self._check_open()
        data = message.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            error = RpcError(Code.RESOURCE_EXHAUSTED, f"a request of {len(data)} bytes is over the limit")
            self._give_up(_failed(error))
            raise error
        self._call.requests.send(data)
        try:
            await self._call.requests.room()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._check_open()

    async def close_send(self) -> None:
        if not self._sending_closed:
            self._sending_closed = True
            self._call.requests.send(_OK)

    def cancel(self) -> None:
        self._give_up(_failed(RpcError(Code.CANCELLED, "the call was cancelled")))

    def send_single(self, request: Message) -> None:
        """The one request of a call that takes one."""
        data = request.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            error = RpcError(Code.RESOURCE_EXHAUSTED, f"a request of {len(data)} bytes is over the limit")
            self._give_up(_failed(error))
        else:
            self._call.requests.send(data)
            self._call.requests.send(_OK)

    def expire(self) -> None:
        """The deadline has passed."""
        if self._call.client_end is None:
            self._call.end_client(_failed(RpcError(Code.DEADLINE_EXCEEDED, "the deadline has passed")))

    def close(self, end: _End) -> None:
        self._give_up(end)

    def _give_up(self, end: _End) -> None:
        if self._call.client_end is None:
            self._call.end_client(end)
            self._call.tell_server()

    def _check_open(self) -> None:
        end = self._call.requests.broken
        if end is not None:
            raise decode_error(*(end.error or (Code.CANCELLED, "the call has ended", b"")))
        if self._sending_closed:
            raise RpcError(Code.FAILED_PRECONDITION, "no more requests: close_send was called")


class MemoryChannel:
    """transport.base.Channel. Calls find the listener when they arrive, so a server may come and go."""

    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._transport = transport
        self._network = transport.network
        self._address = address
        self._streams: dict[MemoryStream, _Call] = {}
        self._closed = False

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        stream = self._start(method, request, timeout, metadata)
        response = await stream.read()
        if response is None:
            raise RpcError(Code.INTERNAL, "the call ended without a response")
        await stream.read()
        return response

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> MemoryStream:
        return self._start(method, request, timeout, metadata)

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.close(_failed(RpcError(Code.CANCELLED, "the channel was closed")))
        self._streams.clear()
        await asyncio.sleep(0)

    def _start(
        self, method: Method, request: Message | None, timeout: float | None, metadata: Mapping[str, str] | None
    ) -> MemoryStream:
        assert (request is None) == method.client_streaming, f"{method.path}: one request, or a stream of them"
        sent = dict(metadata or {})
        assert all(key == key.lower() for key in sent), "metadata keys are lower case"
        if self._closed:
            raise RpcError(Code.UNAVAILABLE, "the channel is closed")
        if self._transport.is_dead:
            raise RpcError(Code.UNAVAILABLE, "this node is dead")
        network = self._network
        for stream in [s for s, c in self._streams.items() if c.client_end is not None]:
            del self._streams[stream]
        target = network.listener(self._address)
        call = _Call(network, self._transport, target.transport if target is not None else self._transport)
        stream = MemoryStream(call, method)
        self._streams[stream] = call
        network.open(call)
        if timeout is not None:
            call.timers.append(network.after(max(0.0, timeout), stream.expire))
        network.after(network.draw_delay_s(), self._arrive, call, method.path, sent, timeout)
        if request is not None:
            stream.send_single(request)
        return stream

    def _arrive(self, call: _Call, path: str, metadata: Mapping[str, str], timeout: float | None) -> None:
        """The opening of a call reaches the address."""
        if call.client_end is not None or call.server_gone:
            call.end_server()
            return
        target = self._network.listener(self._address)
        if target is None or target.transport is not call.server:
            call.finish_server(_unavailable(f"cannot connect to {self._address}"))
        elif not self._network.is_blocked(call.client, call.server):
            target.accept(call, path, metadata, timeout)
        else:
            # A call whose way stays blocked ends by its missed pings.
            self._network.after(RETRANSMIT_S, self._arrive, call, path, metadata, timeout)


class MemoryTransport:
    """transport.base.Transport of one node."""

    def __init__(self, network: MemoryNetwork, node_name: str) -> None:
        self.network = network
        self.node_name = node_name
        self.is_dead = False
        """Set by MemoryNetwork.kill: what is left of the node reaches nobody."""

    async def serve(self, address: str, services: Sequence[Service]) -> MemoryServer:
        if self.is_dead:
            raise OSError(f"{self.node_name} is dead")
        bound = self.network.bind(address)
        server = MemoryServer(self, bound, services)
        self.network.listen(bound, server)
        return server

    def connect(self, address: str) -> MemoryChannel:
        return MemoryChannel(self, join_address(*parse_address(address)))
