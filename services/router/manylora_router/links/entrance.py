"""Where a caller is let in by the table of rules, before a handler runs. The call has its caller then, and what it does
goes into the audit log.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from manylora_shared.audit.entries import Entry
from manylora_shared.errors import ManyloraError, PermissionDenied, RpcError
from manylora_shared.metadata import CALLER_KEY, REQUEST_ID_KEY
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY, Principal, host_of
from manylora_shared.transport.base import ServerCall, methods_of
from manylora_shared.transport.handling import close_iterator

from manylora_router.guard import rules
from manylora_router.links.acts import Acts
from manylora_router.links.callers import Callers

_MAX_ID_CHARS = 64


class KnownCall:
    """A ServerCall whose caller may make it."""

    def __init__(self, call: ServerCall, principal: Principal, peer: str, act: Entry, acts: Acts) -> None:
        self.principal = principal
        self.peer = peer
        self.act = act
        self.target = ""  # of what it did first; empty: it did nothing
        self._call = call
        self._acts = acts

    @property
    def metadata(self) -> Mapping[str, str]:
        """With the caller's host, for the routers that this one asks in its name."""
        return {**self._call.metadata, CALLER_KEY: host_of(self.peer)}

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    async def will(self, target: str, before: bytes | None = None, after: bytes | None = None) -> None:
        """To be called before anything takes effect: it returns when the audit log has it.

        Args:
            before: what stands there; None: nothing does.

        Raises:
            NotAudited, or Overloaded where a tenant's acts are too many.
        """
        await self._acts.intend(self.act, target, before, after)
        self.target = self.target or target


class Entrance:
    def __init__(self, callers: Callers, acts: Acts, getrandbits: Callable[[int], int]) -> None:
        self._callers = callers
        self._acts = acts
        self._getrandbits = getrandbits

    def guarded(
        self, service: ServiceDescriptor, handlers: Mapping[str, Callable[..., Any]]
    ) -> dict[str, Callable[..., Any]]:
        """The handlers, which are asked only by whom the rules let in."""
        methods = methods_of(service)
        return {
            name: self._guard(f"{service.name}/{name}", handler, is_stream=methods[name].server_streaming)
            for name, handler in handlers.items()
        }

    def check_route(self, name: str, principal: Principal, peer: str, request_id: str) -> None:
        """Raises PermissionDenied."""
        try:
            rules.check(rules.ROUTES, name, principal)
        except PermissionDenied:
            self._acts.denied(self._acts.of_call(name, principal, peer, request_id))
            raise

    def _guard(self, name: str, handler: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
        rule = rules.RPCS.get(name)
        if is_stream and (rule is None or not rule.is_act):

            @functools.wraps(handler)
            def stream(request: Any, call: ServerCall) -> AsyncIterator[Any]:
                answers: AsyncIterator[Any] = handler(request, self._enter(name, request, call))
                return answers

            return stream
        if is_stream:

            @functools.wraps(handler)
            async def audited_stream(request: Any, call: ServerCall) -> AsyncIterator[Any]:
                known = self._enter(name, request, call)
                with self._ending(known, request):
                    answers = handler(request, known)
                    try:
                        async for answer in answers:
                            yield answer
                    finally:
                        await close_iterator(answers)

            return audited_stream

        @functools.wraps(handler)
        async def unary(request: Any, call: ServerCall) -> Any:
            known = self._enter(name, request, call)
            with self._ending(known, request):
                return await handler(request, known)

        return unary

    def _enter(self, name: str, request: Any, call: ServerCall) -> KnownCall:
        """Raises Unauthenticated, PermissionDenied."""
        peer = self._callers.peer_of(call)
        principal = self._callers.known(call.metadata.get(AUTHORIZATION_KEY, ""), peer)
        act = self._acts.of_call(name, principal, peer, self._request_id(call))
        try:
            rules.check(rules.RPCS, name, principal)
        except PermissionDenied:
            self._acts.denied(act, _target_of(request))
            raise
        return KnownCall(call, principal, peer, act, self._acts)

    def _request_id(self, call: ServerCall) -> str:
        given = call.metadata.get(REQUEST_ID_KEY, "")
        if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
            return given
        return f"{self._getrandbits(128):032x}"

    @contextmanager
    def _ending(self, call: KnownCall, request: Any) -> Iterator[None]:
        try:
            yield
        except PermissionDenied:
            self._acts.denied(call.act, _target_of(request))
            raise
        except BaseException as e:
            if call.target:
                self._acts.ended(call.act, call.target, _told(e))
            raise
        if call.target:
            self._acts.ended(call.act, call.target)


def _target_of(request: Any) -> str:
    tenant = getattr(request, "tenant_id", "")
    return f"tenant {tenant}" if tenant else ""


def _told(failure: BaseException) -> str:
    if isinstance(failure, ManyloraError | RpcError):
        return f"{failure.code.name}: {failure.message}"
    return f"{type(failure).__name__}: it may have taken effect"
