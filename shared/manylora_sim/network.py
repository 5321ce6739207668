"""The transport of the simulation: services and callers in one event loop, with seeded delay and injected faults.

`MemoryNetwork` owns nodes and listeners; a `Wire` is the way between them. Messages are parsed anew, so no object is
shared. `partition` stalls one direction, and each end breaks when it would have missed a ping (DETECT_MIN_S to
DETECT_MAX_S). Handlers run in the context in which their server was made.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from manylora_shared.address import join_address, parse_address
from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.base import Method, Service, methods_of
from manylora_shared.transport.handling import (
    MAX_MESSAGE_BYTES,
    Admission,
    admitted,
    close_iterator,
    error_of,
    parse_response,
)
from manylora_shared.transport.health import Health
from manylora_shared.transport.status import decode_error

from manylora_sim.network_wire import (
    OK,
    RETRANSMIT_S,
    WINDOW_BYTES,
    Call,
    End,
    Node,
    Pipe,
    Wire,
    failed,
    unavailable,
)

_FIRST_PORT = 40_000
MIN_DELAY_S, MAX_DELAY_S = 0.0002, 0.002  # of one message on its way, where nothing else is said
_CANCELLED = failed(RpcError(Code.CANCELLED, "the call was cancelled"))
_CHANNEL_CLOSED = failed(RpcError(Code.CANCELLED, "the channel was closed"))


class MemoryNetwork:
    """
    Args:
        rng: draws the delay of each message and the moments at which faults are noticed.
        min_delay_s, max_delay_s: of one message on its way.
        window_bytes: of each direction of a call, what may be unread before its writer waits.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        min_delay_s: float = MIN_DELAY_S,
        max_delay_s: float = MAX_DELAY_S,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.wire = Wire(rng, min_delay_s=min_delay_s, max_delay_s=max_delay_s, window_bytes=window_bytes)
        self._next_port = _FIRST_PORT
        self._listeners: dict[str, MemoryServer] = {}
        self._nodes: dict[Node, None] = {}

    def transport(self, node_name: str) -> MemoryTransport:
        """As one incarnation of a node sees the network."""
        node = Node(node_name)
        self._nodes[node] = None
        return MemoryTransport(self, node)

    @property
    def open_calls(self) -> int:
        """0 when everything is at rest."""
        return self.wire.open_calls

    def partition(self, source: str, target: str, *, both_ways: bool = True) -> None:
        """Nothing gets from `source` to `target` until `heal`."""
        self.wire.partition(source, target, both_ways=both_ways)

    def heal(self) -> None:
        """Ends all partitions. What is in transit and not given up arrives."""
        self.wire.heal()

    def set_delays(self, min_delay_s: float = MIN_DELAY_S, max_delay_s: float = MAX_DELAY_S) -> None:
        """Of messages that are sent from now on."""
        self.wire.set_delays(min_delay_s, max_delay_s)

    def heal_between(self, one: str, other: str) -> None:
        self.wire.heal_between(one, other)

    def drop_connections(self, one: str, other: str) -> None:
        """Both ends notice at once."""
        self.wire.drop_connections(one, other)

    def kill(self, node_name: str, *, silently: bool = False) -> None:
        """Its listeners vanish, its handlers are cancelled, nothing that it sends arrives.

        Args:
            silently: its peers notice by missed pings (the machine died) and not by a reset (the process died).
        """
        for node in [n for n in self._nodes if n.name == node_name]:
            node.is_dead = True
            del self._nodes[node]
        for address in [a for a, listener in self._listeners.items() if listener.node.name == node_name]:
            self._listeners.pop(address).vanish()
        self.wire.lose(node_name, silently=silently)

    # ---- for the ends of calls

    def listener(self, address: str) -> MemoryServer | None:
        return self._listeners.get(address)

    def listen(self, address: str, server: MemoryServer) -> None:
        self._listeners[address] = server

    def unlisten(self, address: str) -> None:
        self._listeners.pop(address, None)

    def bind(self, address: str) -> str:
        """The address with its port. Raises OSError, ValueError."""
        host, port = parse_address(address)
        if port == 0:
            self._next_port += 1
            port = self._next_port
        bound = join_address(host, port)
        if bound in self._listeners:
            raise OSError(f"cannot listen on {bound}: the address is in use")
        return bound


def _reader(pipe: Pipe) -> Callable[[], Awaitable[bytes | None]]:
    async def read() -> bytes | None:
        item = await pipe.receive()
        return None if isinstance(item, End) else item

    return read


class _ServerCall:
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
    """Serving, stopped, or vanished with its node."""

    def __init__(self, transport: MemoryTransport, address: str, services: Sequence[Service]) -> None:
        self._node = transport.node
        self._network = transport.network
        self._wire = transport.network.wire
        self._address = address
        self._health = Health([service.descriptor.full_name for service in services])
        self._methods: dict[str, tuple[Method, Service]] = {
            method.path: (method, service)
            for service in (*services, self._health.service())
            for method in methods_of(service.descriptor).values()
        }
        self._calls: dict[Call, None] = {}
        self._context = contextvars.copy_context()
        self._stopping = False

    @property
    def address(self) -> str:
        return self._address

    @property
    def node(self) -> Node:
        return self._node

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
                call.responses.send(unavailable("the server stopped"))
                call.end_server()
        if tasks:
            await asyncio.wait(tasks)

    def vanish(self) -> None:
        """The node is gone; its calls are ended by the network."""
        self._stopping = True

    def accept(self, call: Call, path: str, metadata: Mapping[str, str], timeout: float | None) -> None:
        if self._stopping:
            call.finish_server(unavailable("the server stopped"))
            return
        found = self._methods.get(path)
        if found is None:
            call.finish_server(End((Code.UNIMPLEMENTED, f"unknown method {path}", b"")))
            return
        deadline: float | None = None
        if timeout is not None:
            deadline = self._wire.now() + timeout
            call.timers.append(self._wire.at(deadline, call.end_server))
        server_call = _ServerCall(metadata, f"memory:{call.client.name}", deadline)
        self._calls[call] = None
        call.handler = asyncio.get_running_loop().create_task(
            self._handle(call, *found, server_call), context=self._context.copy()
        )

    async def _handle(self, call: Call, method: Method, service: Service, server_call: _ServerCall) -> None:
        end = OK
        admission: Admission | None = None
        try:
            reader = _reader(call.requests)
            admission = await admitted(service, server_call, method.request_type, reader)
            handler = service.handlers[method.path.rpartition("/")[2]]
            await self._run(call, method, handler, admission, server_call)
        except (Exception, asyncio.CancelledError) as e:
            end = failed(error_of(method.path, e, server_call.metadata))
        finally:
            self._calls.pop(call, None)
            if admission is not None:
                admission.end()
        call.finish_server(end)

    async def _run(
        self,
        call: Call,
        method: Method,
        handler: Callable[..., Any],
        admission: Admission,
        server_call: _ServerCall,
    ) -> None:
        request = admission if method.client_streaming else await admission.single()
        if not method.server_streaming:
            if self._send(call, await handler(request, server_call)):
                await self._may_go_on(call)
            return
        responses = handler(request, server_call)
        try:
            async for response in responses:
                if self._send(call, response):
                    await self._may_go_on(call)
        finally:
            await close_iterator(responses)

    def _send(self, call: Call, response: Message) -> bool:
        """Whether the handler has to wait then."""
        data = response.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"a response of {len(data)} bytes is over the limit")
        call.responses.send(data)
        return call.responses.is_full or call.client_end is not None

    async def _may_go_on(self, call: Call) -> None:
        if call.responses.is_full:
            await call.responses.room()
        if call.client_end is not None:
            await self._wire.future()  # nobody reads any more: the cancellation is on its way


class MemoryStream:
    """The client's end of a call."""

    def __init__(self, call: Call, method: Method) -> None:
        self._call = call
        self._method = method
        self._sending_closed = not method.client_streaming
        self._read_one = False

    async def read(self) -> Any:
        responses = self._call.responses
        while (item := responses.take()) is None:
            try:
                await responses.arrival()
            except asyncio.CancelledError:
                self.cancel()
                raise
        if isinstance(item, bytes):
            return parse_response(self._method.response_type, item)
        self._call.end_client(item)
        if item.error is not None:
            raise decode_error(*item.error)
        return None

    @property
    def has_message(self) -> bool:
        return self._call.responses.has_message

    async def write(self, message: Message) -> None:
        self._check_open()
        data = message.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            error = RpcError(Code.RESOURCE_EXHAUSTED, f"a request of {len(data)} bytes is over the limit")
            self._give_up(failed(error))
            raise error
        self._call.requests.send(data)
        if not self._call.requests.is_full:
            return
        try:
            await self._call.requests.room()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._check_open()

    async def close_send(self) -> None:
        if not self._sending_closed:
            self._sending_closed = True
            self._call.requests.send(OK)

    def cancel(self) -> None:
        self._give_up(_CANCELLED)

    def send_single(self, request: Message) -> None:
        data = request.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            error = RpcError(Code.RESOURCE_EXHAUSTED, f"a request of {len(data)} bytes is over the limit")
            self._give_up(failed(error))
        else:
            self._call.requests.send(data)
            self._call.requests.send(OK)

    def expire(self) -> None:
        if self._call.client_end is None:
            self._call.end_client(failed(RpcError(Code.DEADLINE_EXCEEDED, "the deadline has passed")))

    def close(self, end: End) -> None:
        self._give_up(end)

    def _give_up(self, end: End) -> None:
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
    """Calls find the listener when they arrive, so a server may come and go."""

    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._node = transport.node
        self._network = transport.network
        self._wire = transport.network.wire
        self._address = address
        self._streams: dict[MemoryStream, Call] = {}
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
            stream.close(_CHANNEL_CLOSED)
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
        if self._node.is_dead:
            raise RpcError(Code.UNAVAILABLE, "this node is dead")
        wire = self._wire
        for stream in [s for s, c in self._streams.items() if c.client_end is not None]:
            del self._streams[stream]
        target = self._network.listener(self._address)
        call = Call(wire, self._node, target.node if target is not None else self._node)
        stream = MemoryStream(call, method)
        self._streams[stream] = call
        wire.open(call)
        if timeout is not None:
            call.timers.append(wire.after(max(0.0, timeout), stream.expire))
        wire.after(wire.draw_delay_s(), self._arrive, call, method.path, sent, timeout)
        if request is not None:
            stream.send_single(request)
        return stream

    def _arrive(self, call: Call, path: str, metadata: Mapping[str, str], timeout: float | None) -> None:
        if call.client_end is not None or call.server_gone:
            call.end_server()
            return
        target = self._network.listener(self._address)
        if target is None or target.node is not call.server:
            call.finish_server(unavailable(f"cannot connect to {self._address}"))
        elif not self._wire.is_blocked(call.client, call.server):
            target.accept(call, path, metadata, timeout)
        else:
            # A call whose way stays blocked ends by its missed pings.
            self._wire.after(RETRANSMIT_S, self._arrive, call, path, metadata, timeout)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, node: Node) -> None:
        self.network = network
        self.node = node

    async def serve(self, address: str, services: Sequence[Service]) -> MemoryServer:
        if self.node.is_dead:
            raise OSError(f"{self.node.name} is dead")
        bound = self.network.bind(address)
        server = MemoryServer(self, bound, services)
        self.network.listen(bound, server)
        return server

    def connect(self, address: str) -> MemoryChannel:
        return MemoryChannel(self, join_address(*parse_address(address)))
