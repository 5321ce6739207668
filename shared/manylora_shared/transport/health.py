"""What a server tells without a key: grpc.health.v1 as one of our services, and the gate before it. Owns the serving
state of one server, one flag for all its services.

Watchers are woken by replacing an event, so that none can miss a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

from grpc_health.v1 import health_pb2

from manylora_shared.errors import ManyloraError, NotFound
from manylora_shared.transport.base import ServerCall, Service
from manylora_shared.transport.connections import STRANGER
from manylora_shared.transport.places import Places, Refusals

MAX_PUBLIC_CALLS = 512


class Health:
    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = ("", *service_names)
        self._serving = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    def service(self) -> Service:
        return Service(
            descriptor=health_pb2.DESCRIPTOR.services_by_name["Health"],
            handlers={"Check": self._check, "List": self._list, "Watch": self._watch},
        )

    def _status(self, name: str) -> int:
        response = health_pb2.HealthCheckResponse
        if name not in self._names:
            return int(response.SERVICE_UNKNOWN)
        return int(response.SERVING if self._serving else response.NOT_SERVING)

    async def _check(self, request: health_pb2.HealthCheckRequest, call: ServerCall) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            raise NotFound(f"service: {request.service!r} is not served here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def _list(self, request: health_pb2.HealthListRequest, call: ServerCall) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, call: ServerCall
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()


class Strangers:
    """The gate of what needs no key (health, reflection): no peer keeps all others from it."""

    max_message_bytes = 4 * 1024

    def __init__(self) -> None:
        self._places = Places(MAX_PUBLIC_CALLS, kept=MAX_PUBLIC_CALLS // 2)
        self._refusals = Refusals()

    async def before_entering(self, call: ServerCall) -> Callable[[], _Stranger]:
        return partial(_Stranger, self._places, _host_of(call))

    async def before_refusal(self, call: ServerCall, refusal: ManyloraError) -> None:
        await self._refusals.due(_host_of(call))


class _Stranger:
    __slots__ = ("_peer", "_places")

    owner = STRANGER

    def __init__(self, places: Places, peer: str) -> None:
        self._places = places
        self._peer = peer
        places.enter(peer)

    def slow(self) -> Callable[[], None]:
        return lambda: None

    async def before_parsing(self, size_bytes: int) -> None:
        pass

    def release(self) -> None:
        self._places.leave(self._peer)


def _host_of(call: ServerCall) -> str:
    return call.peer.rpartition(":")[0]
