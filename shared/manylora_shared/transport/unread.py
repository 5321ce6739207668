"""Answers that wait to be read, and how many calls stay at a server whose end nobody reads."""

# Over HTTP/2 a write waits for the reader's window. A cancelled write ends the wait and nothing else: gRPC sends a
# call's end behind what was written before, and cannot drop a call of a server. So the end of a call that is not read
# waits too, without its handler. Such calls are bounded here by whose they are; a connection with more is cut off.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from manylora_shared.errors import Overloaded, SlowReader
from manylora_shared.transport.connections import Connections
from manylora_shared.transport.places import Places

UNREAD_S = 20.0  # a worker ends a generation that is not read after 15 s, and tells what of it was computed
SWEEP_S = 1.0
MAX_UNREAD_ENDS = 4_096
_KEPT = 1_024
_LATE = -1.0

Write = Callable[[bytes], Awaitable[Any]]


def as_stream(handler: Callable[..., Awaitable[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """A single response as a stream of one: gRPC tells nobody whether a single one was read."""

    async def stream(request: Any, call: Any) -> AsyncIterator[Any]:
        yield await handler(request, call)

    return stream


class Unread:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._since: dict[asyncio.Task[Any], float] = {}  # of the writes under way
        self._ends = Places(MAX_UNREAD_ENDS, kept=_KEPT)

    async def write(self, task: asyncio.Task[Any], write: Write, data: bytes) -> None:
        """task: the running one. Raises SlowReader, and what `write` raises."""
        # No timeout of its own: it would cost 5 us, ten times as much as this, beside some 60 for a message.
        self._since[task] = asyncio.get_running_loop().time()
        try:
            await write(data)
        except asyncio.CancelledError:
            if self._since[task] != _LATE:
                raise
            task.uncancel()
            raise SlowReader(f"the answer was not read for {UNREAD_S:g} seconds") from None
        finally:
            del self._since[task]

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(SWEEP_S, UNREAD_S))
            before = asyncio.get_running_loop().time() - UNREAD_S
            for task in [task for task, since in self._since.items() if _LATE < since < before]:
                self._since[task] = _LATE
                task.cancel()  # raised at the write, also where it has just ended

    @contextmanager
    def end(self, peer: str, connections: Connections) -> Iterator[None]:
        """Around the wait for the end of a call whose reader was slow."""
        owner = connections.owner_of(peer)
        try:
            self._ends.enter(owner)
        except Overloaded:
            connections.cut(peer)
            yield
            return
        try:
            yield
        finally:
            self._ends.leave(owner)
