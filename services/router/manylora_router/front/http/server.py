"""The HTTP server: uvicorn in the router's event loop, on a socket of our own. Owns its start and its end in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator, Set
from typing import Any

import uvicorn
from manylora_shared.address import join_address, parse_address
from manylora_shared.coordination.session import first_of
from manylora_shared.transport.connections import SWEEP_S, room
from manylora_shared.transport.places import Places
from manylora_shared.transport.tls import Tls

from manylora_router.front.http import connection
from manylora_router.front.http.connection import LimitedProtocol
from manylora_router.front.http.exchange import SLOW_READER_S
from manylora_router.front.http.handshakes import Handshakes
from manylora_router.front.http.routes import Routes

_LOG = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 64 * 1024  # the kernel's: what hides in it is lost on a reader that has gone
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_CLEAN_UP_S = 5.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the service's


class HttpServer:
    """States: made, serving, stopped."""

    def __init__(self, routes: Routes, tls: Tls | None = None) -> None:
        self._routes = routes
        self._tls = tls
        self._capacity = min(connection.MAX_CONNECTIONS, room() // 2)
        self._places = Places(self._capacity, kept=min(connection.KEPT_CONNECTIONS, self._capacity // 2))
        self._handshakes: Handshakes | None = None
        self._handshaking: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, listen: str) -> None:
        """Port 0: any free one. Raises OSError where the address cannot be bound."""
        bound = _bind(listen)
        self.address = join_address(parse_address(listen)[0], bound.getsockname()[1])
        config = uvicorn.Config(
            self._routes,
            http=functools.partial(LimitedProtocol, places=self._places),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        self._server = _Server(config)
        sockets = [bound]
        if self._tls is not None:
            bound.listen(_BACKLOG)
            sockets = []
        self._serving = asyncio.create_task(self._server.serve(sockets=sockets), name="http")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise OSError(f"the HTTP server on {listen} ended before it served")
            await asyncio.sleep(0.001)
        if self._tls is not None:
            make_protocol = functools.partial(
                LimitedProtocol,
                config=config,
                server_state=self._server.server_state,
                app_state={},
                places=self._places,
            )
            self._handshakes = Handshakes(bound, self._tls.server_context(), make_protocol, self._places)
            self._handshaking = asyncio.create_task(self._handshakes.serve(), name="https")
        self._keeping = asyncio.create_task(self._keep(self._server.server_state.connections), name="http connections")

    async def _keep(self, connections: Set[Any]) -> None:
        """Cuts off whose connections are too many."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            found = connection.beyond([*connections, *(self._handshakes or ())], self._capacity, loop.time())
            for each in found:
                each.cut()
            if found:
                _LOG.warning("too many HTTP connections: %d are cut off", len(found))

    async def failed(self) -> None:
        """Waits until it ends, which only a bug makes it do, and raises why."""
        assert self._serving is not None, "start comes first"
        assert self._keeping is not None
        tasks = [self._serving, self._keeping, self._handshaking]
        await first_of(*(asyncio.shield(task) for task in tasks if task is not None))

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections, and cancels what runs after the grace."""
        if self._server is None or self._serving is None:
            return
        server = self._server
        for task in (self._keeping, self._handshaking):
            if task is not None:
                task.cancel()
        for listener in server.servers:
            listener.close()
        server.should_exit = True
        running = self._routes.running
        if running and grace_s > 0:
            await asyncio.wait(set(running), timeout=grace_s)
        for task in list(running):
            task.cancel()
        if running:
            await asyncio.wait(set(running), timeout=_CLEAN_UP_S)
        for left in list(server.server_state.connections):
            if left.transport is not None:
                left.transport.abort()
        await self._serving
        self._server = self._serving = None


def _bind(listen: str) -> socket.socket:
    host, port = parse_address(listen)
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SLOW_READER_S * 1000))
        bound.bind(address)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise OSError(e.errno, f"cannot listen on {listen}: {e.strerror}") from e
    return bound
