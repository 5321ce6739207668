"""Turns on the router's event loop, flow by flow.

A worker ends a batch's quanta together, and a flood's answers and the requests that follow them arrive in one pass of
the event loop: dozens of times half a millisecond's work, and whoever comes meanwhile waits for all of it at each of
its own steps. So before a request does what takes long (its admission, a message to its caller) it takes a turn, and a
pass of the loop has one turn. Passes are short then, and whose flow has little under way goes before a flood's backlog.

The flows (tenant, class) that wait have turns in proportion to their weights: stride scheduling (Waldspurger and Weihl,
1995). A router that is full serves them as the scheduler would. Where nothing else wants a turn there is no waiting.
"""

from __future__ import annotations

import asyncio
import collections
import heapq

from manylora_shared.ids import QosClass

Flow = tuple[str, QosClass | None]
"""Tenant and class; of a request that has no class, or none that there is: None."""
_STRIDE = 1 << 40


class Turns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        """This pass's turn."""
        self._waiting: dict[Flow, collections.deque[tuple[asyncio.Future[None], int]]] = {}
        """With the weight. A flow with nobody in it is there until it would be its turn."""
        self._order: list[tuple[int, int, Flow]] = []
        """A heap of the flows in `_waiting`: virtual time of the next turn, a number."""
        self._virtual_time = 0
        self._number = 0

    async def take(self, flow: Flow, weight: int) -> None:
        """Waits for the flow's turn: what follows, up to the next `await` that waits, is done in it."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        future: asyncio.Future[None] = loop.create_future()
        if flow not in self._waiting:
            self._waiting[flow] = collections.deque()
            self._push(self._virtual_time, flow)
        self._waiting[flow].append((future, weight))
        await future

    def _push(self, at: int, flow: Flow) -> None:
        self._number += 1
        heapq.heappush(self._order, (at, self._number, flow))

    def _next(self) -> None:
        """A pass later: whose turn it is now."""
        self._is_taken = False
        while self._order and not self._is_taken:
            self._virtual_time, _, flow = heapq.heappop(self._order)
            waiting = self._waiting[flow]
            while waiting and not self._is_taken:
                future, weight = waiting.popleft()
                if not future.done():  # else its task was cancelled
                    future.set_result(None)
                    self._is_taken = True
                    self._push(self._virtual_time + _STRIDE // weight, flow)
            if not self._is_taken:
                del self._waiting[flow]
        if self._is_taken:
            asyncio.get_running_loop().call_soon(self._next)
