"""The HTTP front's one entrance: which handler has a path, whether the caller's key is one, and what a failure becomes.

Owns the requests that run now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack

from manylora_shared.errors import (
    ManyloraError,
    NotFound,
    ServiceUnavailable,
    SlowReader,
    shown,
)
from manylora_shared.transport.handling import error_of

from manylora_router.front.gate import account_of, own_tenant
from manylora_router.front.http import openapi
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.api.around.adapters import load, unload
from manylora_router.front.http.api.around.feedback import feedback
from manylora_router.front.http.api.around.models import health, list_models, metrics, one_model, ready, version
from manylora_router.front.http.api.around.tokens import detokenize, tokenize, tokenizer_info
from manylora_router.front.http.api.around.usage import usage
from manylora_router.front.http.api.chat import chat
from manylora_router.front.http.api.completions import complete
from manylora_router.front.http.api.messages import AnthropicErrors, count_tokens, create
from manylora_router.front.http.api.responses import respond
from manylora_router.front.http.bodies import BodyRoom
from manylora_router.front.http.console import data, files
from manylora_router.front.http.errors import MethodNotAllowed
from manylora_router.front.http.exchange import Exchange, Gone, Message, Receive, Send
from manylora_router.guard import rules

Handler = Callable[[Exchange, Door], Awaitable[None]]

_MODEL = "/v1/models/"
_OPEN: Mapping[str, Mapping[str, Handler]] = {  # to everybody
    "/health": {"GET": health},
    "/ping": {"GET": health, "POST": health},
    "/ready": {"GET": ready},
    "/version": {"GET": version},
    openapi.PATH: {"GET": openapi.describe},
    files.PREFIX: {"GET": files.file},
}
_GUARDED: Mapping[str, Mapping[str, Handler]] = {  # in the name of the tenant that the caller asks for
    "/v1/completions": {"POST": complete},
    "/v1/chat/completions": {"POST": chat},
    "/v1/responses": {"POST": respond},
    "/v1/messages": {"POST": create},
    "/v1/messages/count_tokens": {"POST": count_tokens},
    "/v1/feedback": {"POST": feedback},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
    "/tokenizer_info": {"GET": tokenizer_info},
    "/v1/models": {"GET": list_models},
    _MODEL: {"GET": one_model},
}


_OWN: Mapping[str, Mapping[str, Handler]] = {  # in the caller's own name
    "/v1/load_lora_adapter": {"POST": load},
    "/v1/unload_lora_adapter": {"POST": unload},
    "/v1/usage": {"GET": usage},
    f"{data.PREFIX}me": {"GET": data.me},
    f"{data.PREFIX}status": {"GET": data.status},
    f"{data.PREFIX}history": {"GET": data.history},
    f"{data.PREFIX}adapters": {"GET": data.adapters},
    f"{data.PREFIX}requests": {"GET": data.requests},
    data.REQUEST: {"GET": data.one_request},
    "/metrics": {"GET": metrics},
}


def names() -> list[str]:
    """Every route, as the table of rules names it."""
    found = [(path, method) for table in (_OPEN, _GUARDED, _OWN) for path, row in table.items() for method in row]
    return [f"{method} {path}" for path, method in found]


def _read_as(method: str) -> str:
    return "GET" if method == "HEAD" else method


class Routes:
    """An ASGI application."""

    def __init__(self, door: Door) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self._door = door
        self._room = BodyRoom()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        exchange = Exchange(scope, receive, send, f"{self._door.getrandbits(128):032x}", self._room)
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            await self._answer(exchange, scope["method"])
        except Gone:
            pass
        except asyncio.CancelledError:
            if not exchange.is_gone:
                await self._refuse(exchange, ServiceUnavailable("the router is stopping", retry_after_s=1.0))
        except Exception as e:
            await self._refuse(exchange, error_of(exchange.path, e, exchange.headers))
        finally:
            self.running.discard(task)

    async def _answer(self, exchange: Exchange, method: str) -> None:
        if exchange.path.startswith("/v1/messages"):
            exchange.form = AnthropicErrors()
        path = next((prefix for prefix in (_MODEL, data.REQUEST) if exchange.path.startswith(prefix)), exchange.path)
        with ExitStack() as held:
            if files.is_file(path):
                path = files.PREFIX
            handlers = _OPEN.get(path)
            if handlers is not None:
                if (read_as := _read_as(method)) in handlers:
                    rules.check(rules.ROUTES, f"{read_as} {path}")
            else:
                handlers = self._guarded(exchange, path, method)
                held.enter_context(self._door.places.held(account_of(exchange.tenant)))
                if method != "POST":  # it is answered at once, and may be long
                    await self._door.intake.take_turn(exchange.tenant, None)
            await self._handle(exchange, method, handlers)

    async def _handle(self, exchange: Exchange, method: str, handlers: Mapping[str, Handler]) -> None:
        handler = handlers.get(_read_as(method))
        if handler is None:
            raise MethodNotAllowed(exchange.path, [*handlers])
        await handler(exchange, self._door)

    def _guarded(self, exchange: Exchange, path: str, method: str) -> Mapping[str, Handler]:
        """Before a byte of the body is read."""
        caller = asked.caller_of(exchange.headers)
        principal = self._door.callers.known(caller.authorization, exchange.peer)
        exchange.vouch(account_of(own_tenant(principal)))
        handlers = _GUARDED.get(path) or _OWN.get(path)
        if handlers is None:
            raise NotFound(f"there is no {shown(exchange.path)} here")
        if (method := _read_as(method)) in handlers:
            self._door.entrance.check_route(f"{method} {path}", principal, exchange.peer, exchange.request_id)
        in_name = path in _GUARDED
        exchange.tenant = self._door.intake.tenant_of(asked.nameless(caller)) if in_name else own_tenant(principal)
        return handlers

    async def _refuse(self, exchange: Exchange, error: ManyloraError) -> None:
        if isinstance(error, SlowReader) and exchange.has_begun:
            exchange.abort()
            return
        try:
            await exchange.refuse(error)
        except SlowReader:
            exchange.abort()
