"""Where an RPC's caller is let in by the table of rules, before its handler runs. The call has its caller then."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY, Principal
from manylora_shared.transport.base import ServerCall, methods_of

from manylora_router.guard import rules
from manylora_router.links.callers import Callers


class KnownCall:
    """A ServerCall whose caller may make it."""

    __slots__ = ("_call", "principal")

    def __init__(self, call: ServerCall, principal: Principal) -> None:
        self._call = call
        self.principal = principal

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._call.metadata

    @property
    def peer(self) -> str:
        return self._call.peer

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()


class Entrance:
    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def guarded(
        self, service: ServiceDescriptor, handlers: Mapping[str, Callable[..., Any]]
    ) -> dict[str, Callable[..., Any]]:
        """The handlers, which are asked only by whom the rules let in."""
        methods = methods_of(service)
        return {
            name: self._guard(f"{service.name}/{name}", handler, is_stream=methods[name].server_streaming)
            for name, handler in handlers.items()
        }

    def _guard(self, name: str, handler: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
        if is_stream:

            @functools.wraps(handler)
            def stream(request: Any, call: ServerCall) -> AsyncIterator[Any]:
                answers: AsyncIterator[Any] = handler(request, self._enter(name, call))
                return answers

            return stream

        @functools.wraps(handler)
        async def unary(request: Any, call: ServerCall) -> Any:
            return await handler(request, self._enter(name, call))

        return unary

    def _enter(self, name: str, call: ServerCall) -> KnownCall:
        """Raises Unauthenticated, PermissionDenied."""
        principal = self._callers.known(call.metadata.get(AUTHORIZATION_KEY, ""), call.peer)
        rules.check(rules.RPCS, name, principal)
        return KnownCall(call, principal)
