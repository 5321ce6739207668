"""Turns flow by flow: on the router's event loop, one in a pass of it, and on a pool of threads beside it."""

# A worker ends a batch's quanta together, and a flood's answers and the requests that follow them arrive in one pass of
# the event loop: dozens of times half a millisecond's work. So before a request does what takes long (its admission, a
# message to its caller) it takes a turn. The flows that wait have turns in proportion to their weights, as the
# scheduler would serve them. Where nothing else wants a turn there is no waiting.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manylora_shared.fairness.reference import ReferenceQueue
from manylora_shared.fairness.seam import Rank, Share
from manylora_shared.ids import QosClass

Flow = tuple[str, QosClass | None]  # tenant and class; None: the request has no class, or none that there is


class LoopTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False  # this pass's turn
        # a turn that was waited for is running until the next pass
        self._waiting: ReferenceQueue[Flow, asyncio.Future[None]] = ReferenceQueue()
        self._num_waited = 0

    async def take(self, flow: Flow, weight: int) -> None:
        """The code up to the next `await` that waits is the turn."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next, None)
            return
        future: asyncio.Future[None] = loop.create_future()
        self._num_waited += 1
        self._waiting.push(future, flow, share=Share(weight), rank=Rank(0, 0, self._num_waited))
        await future

    def _next(self, ended: asyncio.Future[None] | None) -> None:
        while (pick := self._waiting.select(lambda future: future)) is not None and pick.item.done():
            self._waiting.remove(pick.item)  # its task was cancelled
        if pick is not None:
            self._waiting.dispatch(pick, 1)
            pick.item.set_result(None)
            asyncio.get_running_loop().call_soon(self._next, pick.item)
        if ended is not None:
            self._waiting.settle(ended, 1)
        self._is_taken = pick is not None


class PoolTurns:
    """Belongs to one event loop. Next has a place who has had least for its weight."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: ReferenceQueue[Flow, asyncio.Future[None]] = ReferenceQueue()
        self._costs: dict[asyncio.Future[None], int] = {}  # of those that wait
        self._num_seen = 0

    @asynccontextmanager
    async def hold(self, flow: Flow, weight: int, cost: int) -> AsyncIterator[None]:
        """Waits for a place. cost: in proportion to the work, at least 1."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_seen += 1
        self._waiting.push(place, flow, share=Share(weight), rank=Rank(0, 0, self._num_seen))
        self._costs[place] = cost
        self._fill()
        try:
            await place
            yield
        finally:
            if place in self._costs:  # cancelled while it waited
                del self._costs[place]
                self._waiting.remove(place)
            else:
                self._waiting.settle(place, cost)
                self._num_free += 1
                self._fill()

    def _fill(self) -> None:
        while self._num_free and (pick := self._waiting.select(lambda place: place)) is not None:
            self._num_free -= 1
            self._waiting.dispatch(pick, self._costs.pop(pick.item))
            if not pick.item.done():  # else its task was cancelled, and gives the place back when it hears of that
                pick.item.set_result(None)
