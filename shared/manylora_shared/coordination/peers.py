"""The secret by which services know one another: made by the first one, kept in the coordination store.

Calls show it in their metadata; one without it ends with UNAUTHENTICATED before anything of it is read.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Put, Store, StoreUnavailable
from manylora_shared.errors import Unauthenticated
from manylora_shared.metadata import PEER_KEY
from manylora_shared.telemetry.logs import hide
from manylora_shared.transport.base import Channel, Method, Server, ServerCall, Service, Stream, Transport, methods_of

_RETRY_S = 0.2


class PeerSecret:
    """Empty until `load`; till then it refuses everybody."""

    def __init__(self) -> None:
        self._value = ""

    async def load(self, store: Store, getrandbits: Callable[[int], int]) -> None:
        """Waits for the store as long as it takes. Raises ValueError where what stands there is no secret."""
        while not self._value:
            try:
                found = await store.get(keys.PEER_SECRET)
                if found is not None:
                    self._value = _read(found.value)
                    hide(self._value)
                else:
                    made = f"{getrandbits(256):064x}".encode()
                    await store.txn([Compare(keys.PEER_SECRET, 0)], [Put(keys.PEER_SECRET, made)])
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)

    def metadata(self) -> dict[str, str]:
        return {PEER_KEY: self._value}

    def check(self, call: ServerCall) -> None:
        """Raises Unauthenticated."""
        shown = call.metadata.get(PEER_KEY, "")
        if not self._value or not hmac.compare_digest(shown.encode(), self._value.encode()):
            raise Unauthenticated("only services of this cluster may call this")


def _read(value: bytes) -> str:
    if not value or not all(0x21 <= byte <= 0x7E for byte in value):
        raise ValueError(f"{keys.PEER_SECRET} in the store: is no secret; delete it, and start all services again")
    return value.decode()


def guarded(service: Service, secret: PeerSecret) -> Service:
    methods = methods_of(service.descriptor)
    return Service(
        service.descriptor,
        {name: _guard(handler, methods[name], secret) for name, handler in service.handlers.items()},
        check=secret.check,
    )


def _guard(handler: Callable[..., Any], method: Method, secret: PeerSecret) -> Callable[..., Any]:
    if method.server_streaming:

        @functools.wraps(handler)
        def stream(request: Any, call: ServerCall) -> AsyncIterator[Any]:
            secret.check(call)
            answers: AsyncIterator[Any] = handler(request, call)
            return answers

        return stream

    @functools.wraps(handler)
    async def unary(request: Any, call: ServerCall) -> Any:
        secret.check(call)
        return await handler(request, call)

    return unary


class PeerTransport:
    """A transport whose calls show the secret."""

    def __init__(self, transport: Transport, secret: PeerSecret) -> None:
        self._transport = transport
        self._secret = secret

    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        return await self._transport.serve(address, services)

    def connect(self, address: str) -> Channel:
        return _PeerChannel(self._transport.connect(address), self._secret)


class _PeerChannel:
    def __init__(self, channel: Channel, secret: PeerSecret) -> None:
        self._channel = channel
        self._secret = secret

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        return await self._channel.call(method, request, timeout=timeout, metadata=self._with_secret(metadata))

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        return self._channel.stream(method, request, timeout=timeout, metadata=self._with_secret(metadata))

    async def close(self) -> None:
        await self._channel.close()

    def _with_secret(self, metadata: Mapping[str, str] | None) -> dict[str, str]:
        return {**(metadata or {}), **self._secret.metadata()}
