"""Calls that have come, asked of gRPC several at a time (docs/decisions/0053).

grpc.aio asks its core for one call, and for the next one when that has a task: some four turns of the event loop and
two of its thread later. What comes faster waits in the core, the calls of all connections in one line.
"""

# cygrpc's names with an underscore are grpc.aio's own loop taken apart. pyproject.toml holds the release that has them.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from grpc._cython import cygrpc

ASKED = 16  # of a method, at each acceptor
A_PASS = 4  # that are taken in a pass of the event loop, over all acceptors: what has come waits for the pass too
MAX_WAITING = 4_096  # calls in an acceptor's line; further ones are turned away, whosever they are

# gRPC's own: from a thousand on it turns calls away at random, with the status CANCELLED.
WAITING = (
    ("grpc.server.max_pending_requests", MAX_WAITING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING),
)


class Passes:
    """How many calls were taken in this pass of the event loop."""

    def __init__(self) -> None:
        self._num_left = A_PASS
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def room(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_left == A_PASS:
            loop.call_soon(self._next)
        if self._num_left:
            self._num_left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._num_left = A_PASS
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_left -= 1
                turn.set_result(None)
        if self._num_left < A_PASS:
            asyncio.get_running_loop().call_soon(self._next)


class Accepting:
    """Of one acceptor (grpc.aio's server), from before its start."""

    def __init__(self, acceptor: Any, handlers: Mapping[str, Any], passes: Passes) -> None:
        """handlers: grpc's, by path. passes: what all acceptors share."""
        self._passes = passes
        self._server = acceptor._server
        self._server.add_registered_method_handlers(dict(handlers))
        self._resolver = cygrpc._MethodResolver([], dict(handlers))
        self._paths = list(handlers)
        self._calls: set[asyncio.Task[None]] = set()  # the event loop holds its tasks weakly

    def start(self) -> list[asyncio.Task[None]]:
        """They end with the acceptor."""
        return [
            asyncio.create_task(self._accept(path), name=f"calls of {path}")
            for path in self._paths
            for _ in range(ASKED - 1)  # beside gRPC's own loop
        ]

    async def _accept(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        method = path.encode()
        while True:
            try:
                state = await self._server._request_registered_call(method)
            except cygrpc._RequestCallError:
                if not self._server.is_running():
                    return
                continue
            await self._passes.room()
            handling = cygrpc._handle_rpc(path, self._resolver, (), state, loop, False)
            call = loop.create_task(cygrpc._schedule_rpc_coro(handling, state, loop, path))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
