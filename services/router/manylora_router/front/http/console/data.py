"""What the console's pages ask: /console/api/... A tenant's key sees its own tenant, an operator's all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version as version_of
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.errors import NotFound, shown
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.roles import Scope

from manylora_router.front.feedback import request_id_of
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.api.around.adapters import admin_call
from manylora_router.front.http.console import documents
from manylora_router.front.http.exchange import Exchange, encoded

PREFIX = "/console/api/"
REQUEST = f"{PREFIX}requests/"  # and its id
MAX_TENANT_NAMES = 1_000
_VERSION = version_of("manylora")
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class _Asked:
    """One call: who asks, and what a time of the event loop is by the wall's clock."""

    def __init__(self, exchange: Exchange, door: Door) -> None:
        """Raises NotFound or Unauthenticated."""
        if door.console is None:
            raise NotFound(f"there is no {shown(exchange.path)} here")
        self._exchange = exchange
        self._moments = door.console
        self.caller = asked.caller_of(exchange.headers)
        self.principal: Principal = door.callers.known(self.caller.authorization)
        self.is_operator = self.principal.tenant_id is None
        self.tenant = self.principal.tenant_id or ""
        self.now = asyncio.get_running_loop().time()
        self._ahead_s = door.now_unix_s() - self.now

    def unix(self, at: float) -> float:
        return round(at + self._ahead_s, 3)

    async def answer(self, what: str, document: Callable[[], Awaitable[Any]]) -> None:
        """Made once for all who ask in the same moment with an equal view."""

        async def body() -> bytes:
            return encoded(await document())

        body_of_moment = await self._moments.once(("console", what, self.tenant), body)
        await self._exchange.answer_bytes(body_of_moment, "application/json", headers=_HEADERS)


async def me(exchange: Exchange, door: Door) -> None:
    """Who has logged in, and where."""
    call = _Asked(exchange, door)
    tenants = door.calls.directory.tenants
    names = sorted(tenants)[:MAX_TENANT_NAMES] if call.is_operator else [call.tenant]
    document = {
        "router": door.router_id,
        "version": _VERSION,
        "base_model": door.intake.base_model,
        "tenant": call.tenant,
        "operator": call.is_operator,
        "may_generate": any(call.principal.may(scope) for scope in (Scope.GENERATE, Scope.GATEWAY)),
        "may_read_usage": call.principal.may(Scope.USAGE_READ),
        "tenants": names,
        "began_unix_s": call.unix(door.calls.recent.samples.began_at),
    }
    await exchange.answer(document, headers=_HEADERS)


async def status(exchange: Exchange, door: Door) -> None:
    call = _Asked(exchange, door)

    async def document() -> Any:
        told = await door.admin["GetStatus"](admin_pb2.GetStatusRequest(), admin_call(exchange, call.caller))
        return documents.status_document(told)

    await call.answer("status", document)


async def history(exchange: Exchange, door: Door) -> None:
    call = _Asked(exchange, door)

    async def document() -> Any:
        return documents.history_document(door.calls.recent.samples, call.tenant, call.unix)

    await call.answer("history", document)


async def adapters(exchange: Exchange, door: Door) -> None:
    call = _Asked(exchange, door)
    directory = door.calls.directory

    async def document() -> Any:
        if call.tenant:
            own = directory.adapters_of(TenantId(call.tenant))
            records = {f"{record.tenant_id}/{record.name}": record for record in own}
        else:
            records = {key: entry.record for key, entry in directory.adapters.items()}
        return documents.adapters_document(records, door.calls.recent.adapters, call.tenant, call.unix)

    await call.answer("adapters", document)


async def requests(exchange: Exchange, door: Door) -> None:
    """The newest."""
    call = _Asked(exchange, door)

    async def document() -> Any:
        door.calls.lives()  # brings them up to date
        newest = door.calls.recent.lives.newest(call.tenant)
        return documents.lives_document(newest, call.unix, call.now, is_operator=call.is_operator)

    await call.answer("requests", document)


async def one_request(exchange: Exchange, door: Door) -> None:
    """By its id, which another tenant's does not have."""
    call = _Asked(exchange, door)
    request_id = request_id_of(exchange.path.removeprefix(REQUEST))
    lives = door.calls.recent.lives
    life = lives.get(call.tenant, request_id) if call.tenant else lives.find(request_id)
    if life is None:
        raise NotFound(f"request_id: {shown(request_id)} is not remembered by this router")
    running = door.calls.live.get(request_id)
    if running is not None and running.record is not None:
        running.record.look()
    document = documents.life_document(life, call.unix, call.now, is_operator=call.is_operator)
    await exchange.answer(document, headers=_HEADERS)
