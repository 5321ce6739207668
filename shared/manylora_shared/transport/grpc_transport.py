"""The transport over gRPC (grpc.aio). Owns every gRPC type, channel option and status mapping of the project.

Messages are parsed here, not by grpc's hooks, so that unparsable bytes get a status that names their type. A peer that
dies silently is noticed by pings within KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc._cython import cygrpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from manylora_shared.address import join_address, parse_address
from manylora_shared.errors import Code, ManyloraError, Overloaded, RpcError, SlowReader
from manylora_shared.process.heap import give_back
from manylora_shared.transport.accepting import WAITING, Accepting, Passes
from manylora_shared.transport.base import Method, Service, methods_of
from manylora_shared.transport.connections import Connections, room
from manylora_shared.transport.handling import (
    MAX_MESSAGE_BYTES,
    Admission,
    admitted,
    close_iterator,
    error_of,
    is_task_cancelled,
    parse_response,
)
from manylora_shared.transport.health import Health, Strangers
from manylora_shared.transport.status import DETAILS_KEY, decode_error, encode_details, message_of
from manylora_shared.transport.tls import Tls
from manylora_shared.transport.unread import Unread, as_stream

_LOG = logging.getLogger(__name__)

KEEPALIVE_TIME_MS = 1000
KEEPALIVE_TIMEOUT_MS = 2000
MAX_METADATA_BYTES = 16 * 1024
MAX_CONCURRENT_CALLS = 16_384  # over all acceptors of a server
MAX_CALLS_A_CONNECTION = 4_096  # a client's further calls wait on its side
HANDSHAKE_TIMEOUT_MS = 10_000

UNREACHABLE = "unreachable"  # the label of an UNAVAILABLE that no server sent
_NO_CONNECTION = "failed to connect to all addresses"  # grpc's words

CANCELLATION_NOTICE_S = 1.0  # after a failed write: how long a handler waits to be cancelled before it cleans up
STATUS_NOTICE_S = 1.0  # after a failed write: how long to wait for the status that says why
STOP_CLEANUP_S = 5.0  # for the `finally` blocks of cancelled handlers; then they are cancelled again

Options = tuple[tuple[str, int | str], ...]

_LIMITS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)
_KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # what really bounds the wait for an answer
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER: Options = (
    *_LIMITS,
    *_KEEPALIVE,
    *WAITING,
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_concurrent_streams", MAX_CALLS_A_CONNECTION),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
_RECONNECT: Options = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2500),  # how long one connection attempt may take, on a busy machine too
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # a channel shares neither connection nor backoff with another
    ("grpc.enable_http_proxy", 0),
)
_CLIENT: Options = (*_LIMITS, *_KEEPALIVE, *_RECONNECT)

ETCD_KEEPALIVE_TIME_MS = 6000  # etcd closes a connection that pings more often than every 5 s


def etcd_channel_options() -> Options:
    """etcd's ping limit, and answers of any size: a listing is one message."""
    return (
        *_RECONNECT,
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", ETCD_KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    )


_STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class _ServerCall:
    __slots__ = ("_metadata", "context")

    def __init__(self, context: Any) -> None:
        self.context = context
        self._metadata: dict[str, str] | None = None

    @property
    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            found: dict[str, str] = {}
            for key, value in self.context.invocation_metadata() or ():
                if isinstance(value, str):
                    found[key] = f"{found[key]}, {value}" if key in found else value
            self._metadata = found
        return self._metadata

    @property
    def peer(self) -> str:
        return str(self.context.peer())

    def time_remaining(self) -> float | None:
        remaining: float | None = self.context.time_remaining()
        return remaining


def _reader(context: Any) -> Callable[[], Awaitable[bytes | None]]:
    """By context.read: grpc's iterator is an async generator that nobody closes when a handler leaves it early."""
    ended = False

    async def read() -> bytes | None:
        nonlocal ended
        if ended:
            return None
        data: Any = await context.read()
        ended = data is grpc.aio.EOF
        return None if ended else data

    return read


def _given(data: bytes) -> Callable[[], Awaitable[bytes | None]]:
    async def read() -> bytes | None:
        return data

    return read


def _status(error: ManyloraError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes]]]:
    code = _STATUS_CODES.get(int(error.code), grpc.StatusCode.UNKNOWN)
    return code, message_of(error), ((DETAILS_KEY, encode_details(error)),)


# An abort is an exception that the call keeps, and a cycle: what a flood of refused calls held would stay until a
# collection of the whole heap, which then takes seconds.
def _set_status(context: Any, error: ManyloraError) -> None:
    """Of a call that ends as its handler returns."""
    code, message, metadata = _status(error)
    context.set_code(code)
    context.set_details(message)
    context.set_trailing_metadata(metadata)


class _Handlers:
    """Knows the tasks that run handlers, and refuses more than MAX_CONCURRENT_CALLS where no gate bounds them."""

    def __init__(self, connections: Connections) -> None:
        self.running: set[asyncio.Task[Any]] = set()
        self._connections = connections
        self.unread = Unread()

    def _check_room(self) -> None:
        if len(self.running) >= MAX_CONCURRENT_CALLS:
            raise Overloaded(f"{MAX_CONCURRENT_CALLS} calls are under way here")

    def wrap(self, method: Method, service: Service) -> Any:
        """grpc's handler object, without (de)serializers. To grpc a call that is gated or checked is one that streams
        its request: grpc reads a single one before it asks anybody; and a gated one is one that streams its answer.
        """
        is_open = service.gate is None and service.check is None
        is_stream = method.server_streaming or service.gate is not None
        run = (self._streaming if is_stream else self._single)(method, service)
        kind = ("unary" if is_open and not method.client_streaming else "stream") + (
            "_stream" if is_stream else "_unary"
        )
        return getattr(grpc, f"{kind}_rpc_method_handler")(run)

    async def _admitted(self, method: Method, service: Service, data: Any, call: _ServerCall) -> Admission:
        if service.gate is None:
            self._check_room()
        is_open = service.gate is None and service.check is None
        read = _given(data) if is_open and not method.client_streaming else _reader(call.context)
        admission = await admitted(service, call, method.request_type, read)
        if owner := admission.owner:
            self._connections.vouch(call.peer, owner)
        return admission

    def _single(self, method: Method, service: Service) -> Callable[..., Any]:
        handler, running = service.handlers[method.path.rpartition("/")[2]], self.running

        async def run(data: Any, context: Any) -> bytes:
            task = asyncio.current_task()
            assert task is not None
            call = _ServerCall(context)
            admission: Admission | None = None
            try:
                admission = await self._admitted(method, service, data, call)
                running.add(task)
                request = admission if method.client_streaming else await admission.single()
                response: Message = await handler(request, call)
                encoded: bytes = response.SerializeToString()
                return encoded
            except (Exception, asyncio.CancelledError) as e:
                error = error_of(method.path, e, call.metadata)
            finally:
                running.discard(task)
                if admission is not None:
                    admission.end()
            await context.abort(*_status(error))
            raise AssertionError("abort returned")

        return run

    def _streaming(self, method: Method, service: Service) -> Callable[..., Any]:
        handler, running = service.handlers[method.path.rpartition("/")[2]], self.running
        if not method.server_streaming:
            handler = as_stream(handler)

        async def run(data: Any, context: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            call = _ServerCall(context)
            admission: Admission | None = None
            responses: Any = None
            write = context.write if service.gate is None else partial(self.unread.write, task, context.write)
            try:
                while True:
                    try:
                        if admission is None:
                            admission = await self._admitted(method, service, data, call)
                            running.add(task)
                            request = admission if method.client_streaming else await admission.single()
                            responses = handler(request, call).__aiter__()
                        response = await responses.__anext__()
                    except StopAsyncIteration:
                        return
                    except (Exception, asyncio.CancelledError) as e:
                        error = error_of(method.path, e, call.metadata)
                        break
                    try:
                        await write(response.SerializeToString())
                    except SlowReader as e:
                        error = e
                        break
                    except Exception:
                        # The call is dead. Its cancellation follows, and must not hit the clean-up below half-way.
                        await asyncio.sleep(CANCELLATION_NOTICE_S)
                        raise
            finally:
                if responses is not None:
                    await close_iterator(responses)
                running.discard(task)
                if admission is not None:
                    admission.end()
            if isinstance(error, SlowReader):
                with self.unread.end(context.peer(), self._connections):
                    await context.abort(*_status(error))
            _set_status(context, error)
            error.with_traceback(None)  # whose frames hold this one

        return run


class GrpcServer:
    """States: serving, stopped; `stop` may be called again. `acceptors` share port, handlers and health."""

    def __init__(
        self,
        acceptors: Sequence[Any],
        address: str,
        health: Health,
        handlers: _Handlers,
        upkeep: Sequence[asyncio.Task[None]],
    ) -> None:
        self._acceptors = acceptors
        self._address = address
        self._health = health
        self._handlers = handlers
        self._upkeep = upkeep

    @property
    def address(self) -> str:
        return self._address

    def set_serving(self, serving: bool) -> None:
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Also waits for the `finally` blocks of the handlers that it cancels."""
        self._health.set_serving(False)
        await asyncio.gather(*(acceptor.stop(grace_s if grace_s > 0 else None) for acceptor in self._acceptors))
        left = {task for task in self._handlers.running if task is not asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=STOP_CLEANUP_S)
        for task in left:
            _LOG.error("a handler did not end %s s after its cancellation: %r", STOP_CLEANUP_S, task)
            task.cancel()
        for task in self._upkeep:
            task.cancel()


class GrpcStream:
    __slots__ = ("_answered", "_call", "_channel", "_method", "_sending_closed")

    def __init__(self, call: Any, method: Method, channel: Any) -> None:
        self._call = call
        self._channel = channel  # which ends with the last that holds it
        self._method = method
        self._sending_closed = not method.client_streaming
        self._answered = False  # its one response was read, where there is no response stream

    async def read(self) -> Any:
        if self._answered:
            return None
        try:
            data = await (self._call.read() if self._method.server_streaming else self._call)
        except (grpc.RpcError, asyncio.CancelledError) as e:
            raise _client_error(e) from None
        if data is grpc.aio.EOF:
            return None
        self._answered = not self._method.server_streaming
        return parse_response(self._method.response_type, data)

    @property
    def has_message(self) -> bool:
        return False  # grpc does not tell

    async def write(self, message: Message) -> None:
        """Past grpc's own `write`, which replaces the status of a call that ended meanwhile with INTERNAL."""
        call = self._call
        try:
            if call.done():
                raise await self._ended()
            if self._sending_closed:
                raise RpcError(Code.FAILED_PRECONDITION, "no more requests: close_send was called")
            await call.wait_for_connection()
            await call._cython_call.send_serialized_message(message.SerializeToString())
        except cygrpc.InternalError:
            raise await self._ended() from None
        except asyncio.CancelledError as e:
            call.cancel()
            raise _client_error(e) from None
        except grpc.RpcError as e:
            raise _client_error(e) from None

    async def close_send(self) -> None:
        if self._sending_closed:
            return
        self._sending_closed = True
        try:
            await self._call.done_writing()
        except cygrpc.InternalError:
            return  # the call has ended: there is nothing to half-close
        except (grpc.RpcError, asyncio.CancelledError) as e:
            raise _client_error(e) from None

    def cancel(self) -> None:
        self._call.cancel()

    async def _ended(self) -> RpcError:
        call = self._call
        try:
            code = await asyncio.wait_for(call.code(), STATUS_NOTICE_S)
        except TimeoutError:  # responses that were not read stand before the status
            return RpcError(Code.UNAVAILABLE, "the call has ended")
        if code is grpc.StatusCode.OK:
            return RpcError(Code.CANCELLED, "the call has ended")
        return _decode(code, await call.details(), await call.trailing_metadata())


def _decode(code: grpc.StatusCode, details: str | None, trailing_metadata: Any) -> RpcError:
    blob: bytes | None = None
    for key, value in trailing_metadata or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            blob = value
    error = decode_error(Code(code.value[0]), details or "", blob)
    if error.code is Code.UNAVAILABLE and error.message.startswith(_NO_CONNECTION):
        error.label = UNREACHABLE
    return error


def _client_error(error: BaseException) -> BaseException:
    """A CancelledError stays one only where the waiting task itself is cancelled."""
    if isinstance(error, asyncio.CancelledError):
        return error if is_task_cancelled() else RpcError(Code.CANCELLED, "the call was cancelled")
    assert isinstance(error, grpc.RpcError)
    return _decode(error.code(), error.details(), error.trailing_metadata())


class GrpcChannel:
    def __init__(self, address: str, options: Options = _CLIENT, tls: Tls | None = None) -> None:
        self._address = address
        self._options = options
        self._tls = tls
        self._generation = tls.generation if tls is not None else 0
        self._channel = self._dial()
        self._left: weakref.WeakSet[Any] = weakref.WeakSet()  # earlier certificates' channels, while calls use them
        self._multicallables: dict[str, Any] = {}
        self._closed = False

    def _dial(self) -> Any:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._tls.channel_credentials(), options=self._options)

    def _multicallable(self, method: Method) -> Any:
        if self._tls is not None and self._tls.generation != self._generation and not self._closed:
            self._generation = self._tls.generation
            self._left.add(self._channel)
            self._channel = self._dial()
            self._multicallables.clear()
        found = self._multicallables.get(method.path)
        if found is None:
            if self._closed:
                raise RpcError(Code.UNAVAILABLE, "the channel is closed")
            kind = "stream" if method.client_streaming else "unary"
            kind += "_stream" if method.server_streaming else "_unary"
            found = self._multicallables[method.path] = getattr(self._channel, kind)(method.path)
        return found

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        multicallable = self._multicallable(method)
        try:
            data = await multicallable(
                request.SerializeToString(),
                timeout=timeout,
                metadata=tuple(metadata.items()) if metadata else None,
            )
        except (grpc.RpcError, asyncio.CancelledError) as e:
            raise _client_error(e) from None
        return parse_response(method.response_type, data)

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> GrpcStream:
        assert (request is None) == method.client_streaming, (
            f"{method.path}: a request is given where it is a single one"
        )
        arguments: tuple[bytes, ...] = () if request is None else (request.SerializeToString(),)
        call = self._multicallable(method)(
            *arguments, timeout=timeout, metadata=tuple(metadata.items()) if metadata else None
        )
        return GrpcStream(call, method, self._channel)

    def is_ready(self) -> bool:
        """Starts a connection where none stands."""
        return self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    async def wait_connected(self) -> bool:
        """Waits until a connection stands (true) or an attempt has failed (false)."""
        settled = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state in settled:
                return False
            await self._channel.wait_for_state_change(state)

    async def close(self) -> None:
        self._closed = True
        self._multicallables.clear()
        for channel in (self._channel, *self._left):
            await channel.close()


class GrpcTransport:
    """
    Args:
        acceptors: grpc's servers on one port. Each has a line of its own for calls that have come, so with k of them
            a connection's burst holds up one k-th of the others.
        tls: of servers and channels; None: plain text.
    """

    def __init__(self, *, acceptors: int = 1, tls: Tls | None = None) -> None:
        self._num_acceptors = acceptors
        self._tls = tls

    async def serve(self, address: str, services: Sequence[Service]) -> GrpcServer:
        host, port = parse_address(address)
        names = [service.descriptor.full_name for service in services]
        health = Health(names)
        public = (health.service(), _reflection_service(names))
        strangers = Strangers()
        connections = Connections(room())
        handlers = _Handlers(connections)
        generic_handlers = []
        crowded: dict[str, Any] = {}
        for service in (*services, *(replace(each, gate=strangers) for each in public)):
            methods = methods_of(service.descriptor)
            wrapped = {name: handlers.wrap(method, service) for name, method in methods.items()}
            generic_handlers.append(grpc.method_handlers_generic_handler(service.descriptor.full_name, wrapped))
            crowded |= {methods[name].path: wrapped[name] for name in service.crowded}
        try:
            if self._num_acceptors > 1 and port:
                _check_unused(host, port)
            acceptors, accepting, passes = [], [], Passes()
            for _ in range(self._num_acceptors):
                acceptor = grpc.aio.server(options=(*_SERVER, ("grpc.so_reuseport", int(self._num_acceptors > 1))))
                acceptor.add_generic_rpc_handlers(generic_handlers)
                accepting.append(Accepting(acceptor, crowded, passes))
                bound = join_address(host, port)
                if self._tls is None:
                    port = acceptor.add_insecure_port(bound)
                else:
                    port = acceptor.add_secure_port(bound, self._tls.server_credentials())
                acceptors.append(acceptor)
        except (RuntimeError, OSError) as e:
            raise OSError(errno.EADDRNOTAVAIL, f"cannot listen on {address}: {e}") from e
        for acceptor in acceptors:
            await acceptor.start()
        upkeep = [task for each in accepting for task in each.start()]
        if any(service.gate is not None for service in services):  # strangers come here
            upkeep += [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("connections", connections.keep(port)),
                    ("memory", give_back()),
                    ("unread answers", handlers.unread.keep()),
                )
            ]
        return GrpcServer(acceptors, join_address(host, port), health, handlers, upkeep)

    def connect(self, address: str) -> GrpcChannel:
        return GrpcChannel(join_address(*parse_address(address)), tls=self._tls)


def _check_unused(host: str, port: int) -> None:
    """Raises OSError: acceptors share their port with whoever asks, but two processes on one are an error."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()


def _reflection_service(names: Sequence[str]) -> Service:
    descriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    servicer = reflection.aio.ReflectionServicer([*names, "grpc.health.v1.Health", descriptor.full_name])
    return Service(descriptor=descriptor, handlers={"ServerReflectionInfo": servicer.ServerReflectionInfo})
