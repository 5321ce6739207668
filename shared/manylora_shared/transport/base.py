"""The seam between services: calls and streams of protobuf messages, without gRPC's types.

Two implementations: `grpc_transport` (production) and `memory` (the simulation's network with seeded delay, loss and
partitions). Servicers and clients are written against this module only.

A *handler* is an async function for the two call kinds with one response, and a function returning an async iterator
(an async generator) for the two with a response stream:

    unary         async def handler(request, call) -> response
    server stream def handler(request, call) -> AsyncIterator[response]
    client stream async def handler(requests: AsyncIterator, call) -> response
    bidirectional def handler(requests: AsyncIterator, call) -> AsyncIterator[response]

A handler that raises a ManyloraError ends its call with that error's code, message, violations and retry hint; any
other exception ends it with INTERNAL and is logged. When the caller cancels or vanishes, the handler is cancelled
(asyncio.CancelledError); its `finally` blocks run. Bytes that are not the request's message end with INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


@dataclass(frozen=True)
class Method:
    """One RPC of a service, read off its protobuf descriptor."""

    path: str
    """`/package.Service/Method`."""
    request_type: type[Message]
    response_type: type[Message]
    client_streaming: bool
    server_streaming: bool


def methods_of(service: ServiceDescriptor) -> dict[str, Method]:
    """The methods of a service (`some_pb2.DESCRIPTOR.services_by_name["SomeService"]`) by their short name."""
    return {
        m.name: Method(
            path=f"/{service.full_name}/{m.name}",
            request_type=GetMessageClass(m.input_type),
            response_type=GetMessageClass(m.output_type),
            client_streaming=m.client_streaming,
            server_streaming=m.server_streaming,
        )
        for m in service.methods
    }


class ServerCall(Protocol):
    """What a handler may know of its call."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Request metadata, keys in lower case; the values of a repeated key as one, joined by `, ` (RFC 9110, 5.3), so
        that nothing is taken from one of them while somebody else reads another. Binary (-bin) keys are left out."""

    @property
    def peer(self) -> str: ...

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None where it set none."""


@dataclass(frozen=True)
class Service:
    """A service and the handlers of all its methods, by the method's short name."""

    descriptor: ServiceDescriptor
    handlers: Mapping[str, Callable[..., Any]]

    def __post_init__(self) -> None:
        missing = {m.name for m in self.descriptor.methods} ^ set(self.handlers)
        assert not missing, f"{self.descriptor.full_name}: handlers and methods differ in {sorted(missing)}"


class Stream(Protocol):
    """The client's end of a call with a stream in either direction. One reader and one writer task at most.

    Cancelling a task that waits in `read` or `write` cancels the call: a timeout around one `read` ends the stream.
    After `cancel` both raise RpcError(CANCELLED).
    """

    async def read(self) -> Any:
        """The next response; None after the last. Raises RpcError where the call ended with a status other than OK."""

    @property
    def has_message(self) -> bool:
        """Whether a response is known to be there: `read` does not wait then. Where nobody can say, False."""

    async def write(self, message: Message) -> None:
        """Sends one request of a client stream. Raises RpcError once the call has ended."""

    async def close_send(self) -> None:
        """No more requests."""

    def cancel(self) -> None:
        """Ends the call at once. Safe to call again, and after the end."""


class Channel(Protocol):
    """A connection to one address. Connects lazily, reconnects by itself; calls fail with UNAVAILABLE meanwhile."""

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        """A unary call. `timeout` in seconds. Raises RpcError."""

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        """Starts a streaming call; `request` is given exactly where the method takes a single one."""

    async def close(self) -> None: ...


class Server(Protocol):
    @property
    def address(self) -> str:
        """`host:port` as bound (port 0 resolved)."""

    def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers for the server and each service; false until first called with true."""

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones go on for `grace_s` seconds, then cancels them."""


class Transport(Protocol):
    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        """Listens on `host:port` (port 0: any free one). Raises OSError where the address cannot be bound."""

    def connect(self, address: str) -> Channel: ...
