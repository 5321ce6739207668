"""The seam between services: calls and streams of protobuf messages, without gRPC's types."""

# A handler is
#
#     unary         async def handler(request, call) -> response
#     server stream def handler(request, call) -> AsyncIterator[response]
#     client stream async def handler(requests: AsyncIterator, call) -> response
#     bidirectional def handler(requests: AsyncIterator, call) -> AsyncIterator[response]
#
# A ManyloraError that it raises is the call's status; anything else is logged and told as INTERNAL. When the caller
# cancels or vanishes, the handler is cancelled.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from manylora_shared.errors import ManyloraError


@dataclass(frozen=True)
class Method:
    path: str  # `/package.Service/Method`
    request_type: type[Message]
    response_type: type[Message]
    client_streaming: bool
    server_streaming: bool


def methods_of(service: ServiceDescriptor) -> dict[str, Method]:
    """By short name."""
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
    @property
    def metadata(self) -> Mapping[str, str]:
        """Keys in lower case, the values of a repeated key joined by `, ` (RFC 9110, 5.3); no binary (-bin) keys."""

    @property
    def peer(self) -> str: ...

    def time_remaining(self) -> float | None:
        """In seconds; None: the caller set no deadline."""


class Hold(Protocol):
    """A call that was let in."""

    owner: str  # whose key came; empty: none did

    def slow(self) -> Callable[[], None]:
        """Asked once, where the message is late. What is returned is called when it is there, or is given up.

        Raises ManyloraError where it is not waited for.
        """

    async def before_parsing(self, size_bytes: int) -> None:
        """Raises ManyloraError where it is not to be parsed."""

    def release(self) -> None: ...


class Gate(Protocol):
    """Asked by a call's metadata alone: while it refuses, not a byte of the message is read."""

    max_message_bytes: int

    async def before_entering(self, call: ServerCall) -> Callable[[], Hold]:
        """Returns when it is the call's turn to enter, which it does by what is returned. That raises ManyloraError."""

    async def before_refusal(self, call: ServerCall, refusal: ManyloraError) -> None:
        """Returns when what entering raised may be told."""


@dataclass(frozen=True)
class Service:
    descriptor: ServiceDescriptor
    handlers: Mapping[str, Callable[..., Any]]
    check: Callable[[ServerCall], None] | None = None  # the handlers' own: whatever carries their calls asks it first,
    # by a call's metadata, before it reads anything
    gate: Gate | None = None
    crowded: Sequence[str] = ()  # methods whose calls come by thousands at once

    def __post_init__(self) -> None:
        missing = {m.name for m in self.descriptor.methods} ^ set(self.handlers)
        assert not missing, f"{self.descriptor.full_name}: handlers and methods differ in {sorted(missing)}"


class Stream(Protocol):
    """The client's end of a call with a stream. One reader and one writer task at most.

    Cancelling a task that waits in `read` or `write` cancels the call; after `cancel` both raise RpcError(CANCELLED).
    """

    async def read(self) -> Any:
        """None after the last. Raises RpcError where the call ended with a status other than OK."""

    @property
    def has_message(self) -> bool:
        """Whether `read` would not wait; False where nobody can say."""

    async def write(self, message: Message) -> None:
        """Raises RpcError once the call has ended."""

    async def close_send(self) -> None:
        """No more requests."""

    def cancel(self) -> None:
        """Safe to call again, and after the end."""


class Channel(Protocol):
    """Connects lazily and reconnects by itself; calls fail with UNAVAILABLE meanwhile."""

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        """`timeout` in seconds. Raises RpcError."""

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        """`request` is given exactly where the method takes a single one."""

    async def close(self) -> None: ...


class Server(Protocol):
    @property
    def address(self) -> str:
        """`host:port` as bound."""

    def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers; false at first."""

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, and cancels running ones after the grace."""


class Transport(Protocol):
    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        """Port 0: any free one. Raises OSError where the address cannot be bound."""

    def connect(self, address: str) -> Channel: ...
