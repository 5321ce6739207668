"""The way between the nodes of the in-memory network: calls in transit, their delays, and its faults.

A `Call` owns two pipes, in which bytes travel in order with delays of their own. Every decision is a function of the
calls, of the loop's time and of `rng`. Deliveries run in the wire's own context: they belong to no simulated process.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from manylora_shared.errors import Code, ManyloraError, RpcError
from manylora_shared.transport.status import encode_details, message_of

from manylora_sim.loop import SimLoop

WINDOW_BYTES = 64 * 1024
DETECT_MIN_S = 2.0
DETECT_MAX_S = 3.0  # one missed ping's timeout, and up to the time between pings more
RETRANSMIT_S = 0.2  # how often what cannot wait in a pipe is tried again while the way is blocked


class End:
    """The last item of a pipe: half-close (no error) or the call's status."""

    __slots__ = ("error",)

    def __init__(self, error: tuple[Code, str, bytes] | None = None) -> None:
        self.error = error


OK = End()


class Node:
    __slots__ = ("is_dead", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False  # what is left of the node reaches nobody


class Pipe:
    """One direction of one call. One reader and one writer."""

    def __init__(self, wire: Wire, source: Node, target: Node) -> None:
        self._wire = wire
        self._source = source
        self._target = target
        self._in_transit: deque[bytes | End] = deque()
        self._arrived: deque[bytes | End] = deque()
        self._last_arrival = 0.0
        self._due = 0
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._broken: End | None = None
        self._silent = False
        self.on_end: Callable[[End], None] | None = None  # called when an End arrives, read or not

    @property
    def broken(self) -> End | None:
        return self._broken

    def send(self, item: bytes | End) -> None:
        if self._broken is not None or self._silent:
            return
        if isinstance(item, bytes):
            self._unread_bytes += len(item)
        self._in_transit.append(item)
        self._last_arrival = self._wire.depart(self._last_arrival, self._arrive)

    @property
    def is_full(self) -> bool:
        return self._unread_bytes >= self._wire.window_bytes and self._broken is None

    async def room(self) -> None:
        """Waits until a writer may send, or the pipe is broken."""
        while self.is_full:
            self._writer = self._wire.future()
            await self._writer

    async def receive(self) -> bytes | End:
        """The last item comes again and again."""
        while (item := self.take()) is None:
            await self.arrival()
        return item

    def take(self) -> bytes | End | None:
        """None: wait for it."""
        if not self._arrived:
            return self._broken
        item = self._arrived[0]
        if isinstance(item, bytes):
            self._arrived.popleft()
            self._unread_bytes -= len(item)
            if self._writer is not None:
                _wake(self._writer)
        return item

    @property
    def has_message(self) -> bool:
        return bool(self._arrived) and isinstance(self._arrived[0], bytes)

    def arrival(self) -> asyncio.Future[None]:
        assert self._reader is None or self._reader.done(), "one reader at most"
        reader = self._reader = self._wire.future()
        return reader

    def break_off(self, end: End) -> None:
        """The reader gets `end` next; further items are dropped."""
        if self._broken is None:
            self._broken = end
            self._in_transit.clear()
            self._arrived.clear()
            _wake(self._reader)
            _wake(self._writer)

    def fall_silent(self) -> None:
        # the writer's node is gone: nothing arrives any more; the reader waits
        self._silent = True
        self._in_transit.clear()

    def flush(self) -> None:
        # after a stall: due items arrive
        wire = self._wire
        while (
            self._due and self._in_transit and not (wire.has_partitions and wire.is_blocked(self._source, self._target))
        ):
            self._due -= 1
            item = self._in_transit.popleft()
            self._arrived.append(item)
            _wake(self._reader)
            if isinstance(item, End) and self.on_end is not None:
                self.on_end(item)

    def _arrive(self) -> None:
        if self._due or self._wire.has_partitions or not self._in_transit:
            self._due += 1
            self.flush()
            return
        item = self._in_transit.popleft()
        self._arrived.append(item)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)
        if self.on_end is not None and isinstance(item, End):
            self.on_end(item)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Call:
    """The client's end is over once `client_end` is set. The server's end lives while `handler` does."""

    def __init__(self, wire: Wire, client: Node, server: Node) -> None:
        self._wire = wire
        self.client = client
        self.server = server
        self.requests = Pipe(wire, client, server)
        self.responses = Pipe(wire, server, client)
        self.responses.on_end = self.requests.break_off  # once the call is over nobody reads requests
        self.client_end: End | None = None
        self.handler: asyncio.Task[None] | None = None
        self.server_gone = False
        self.timers: list[asyncio.TimerHandle] = []

    def end_client(self, end: End) -> None:
        if self.client_end is None:
            self.client_end = end
            self.responses.break_off(end)
            self.requests.break_off(end)
            self._close_if_over()

    def end_server(self) -> None:
        if not self.server_gone:
            self.server_gone = True
            if self.handler is not None and not self.handler.done():
                self.handler.cancel()
            self._close_if_over()

    def finish_server(self, end: End) -> None:
        if not self.server_gone:
            self.server_gone = True
            self.responses.send(end)
            self._close_if_over()

    def tell_server(self) -> None:
        """The server hears of it when the way is free, or misses its pings."""
        self._wire.deliver(self.client, self.server, self.end_server)

    def tell_client(self) -> None:
        """As `tell_server`."""
        self._wire.deliver(self.server, self.client, self._reset_client)

    def miss_pings(self, *, at_client: bool) -> None:
        if at_client and self.client_end is None:
            self.end_client(unavailable("ping timeout"))
            self.tell_server()
        elif not at_client and not self.server_gone:
            self.end_server()
            self.tell_client()

    def _reset_client(self) -> None:
        self.end_client(unavailable("the connection was reset"))

    def _close_if_over(self) -> None:
        if self.server_gone and self.client_end is not None:
            for timer in self.timers:
                timer.cancel()
            self._wire.forget(self)


class Wire:
    """Args: see MemoryNetwork."""

    def __init__(self, rng: random.Random, *, min_delay_s: float, max_delay_s: float, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._rng = rng
        self._random = rng.random
        self._min_delay_s = min_delay_s
        self._delay_range_s = max_delay_s - min_delay_s
        self._calls: dict[Call, None] = {}
        self._blocked: dict[tuple[str, str], int] = {}
        self._partitions = 0
        self._context = contextvars.copy_context()
        self._loop: asyncio.AbstractEventLoop | None = None  # asked for once: this is done for each message

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def partition(self, source: str, target: str, *, both_ways: bool = True) -> None:
        for pair in [(source, target), (target, source)] if both_ways else [(source, target)]:
            if pair not in self._blocked:
                self._partitions += 1
                self._blocked[pair] = self._partitions
        for call in list(self._calls):
            self.watch_stall(call)

    def set_delays(self, min_delay_s: float, max_delay_s: float) -> None:
        self._min_delay_s = min_delay_s
        self._delay_range_s = max_delay_s - min_delay_s

    def heal(self) -> None:
        self._blocked.clear()
        self._flush()

    def heal_between(self, one: str, other: str) -> None:
        for pair in [(one, other), (other, one)]:
            self._blocked.pop(pair, None)
        self._flush()

    def _flush(self) -> None:
        for call in list(self._calls):
            call.requests.flush()
            call.responses.flush()

    def drop_connections(self, one: str, other: str) -> None:
        for call in list(self._calls):
            if {call.client.name, call.server.name} == {one, other}:
                call.end_server()
                call.end_client(unavailable("the connection was reset"))

    def lose(self, node_name: str, *, silently: bool) -> None:
        """Breaks the calls of a node that is gone; its handlers are cancelled."""
        for call in list(self._calls):
            delay_s = self.draw_detection_s() if silently else self.draw_delay_s()
            if call.server.name == node_name:
                call.responses.fall_silent()
                call.end_server()
                self.after(delay_s, call.end_client, unavailable("the connection was lost"))
            if call.client.name == node_name:
                call.end_client(unavailable("this node is dead"))
                self.after(delay_s, call.end_server)

    # ---- for the calls and their ends

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def now(self) -> float:
        return self.loop.time()

    def future(self) -> asyncio.Future[None]:
        # for one end of a call alone: it is in no set, and need not hash alike in every run
        return asyncio.Future(loop=self._loop or self.loop)

    def at(self, when: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_at(when, callback, *args, context=self._context)

    def depart(self, not_before: float, callback: Callable[[], None]) -> float:
        """After a message's delay, and not before that time. Returns when."""
        loop = self.loop
        when = loop.time() + self._min_delay_s + self._delay_range_s * self._random()
        if when < not_before:
            when = not_before
        if isinstance(loop, SimLoop):
            loop.arrive_at(when, callback)
        else:
            loop.call_at(when, callback, context=self._context)
        return when

    def after(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self.at(self.now() + delay_s, callback, *args)

    def draw_delay_s(self) -> float:
        return self._min_delay_s + self._delay_range_s * self._random()

    def draw_detection_s(self) -> float:
        return self._rng.uniform(DETECT_MIN_S, DETECT_MAX_S)

    def deliver(self, source: Node, target: Node, action: Callable[[], None]) -> None:
        """After a message's delay, or later, when the way is free."""
        self.after(self.draw_delay_s(), self._deliver, source, target, action)

    def _deliver(self, source: Node, target: Node, action: Callable[[], None]) -> None:
        if self.is_blocked(source, target):
            self.after(RETRANSMIT_S, self._deliver, source, target, action)
        else:
            action()

    @property
    def has_partitions(self) -> bool:
        return bool(self._blocked)

    def is_blocked(self, source: Node, target: Node) -> bool:
        return (source.name, target.name) in self._blocked

    def open(self, call: Call) -> None:
        self._calls[call] = None
        self.watch_stall(call)

    def forget(self, call: Call) -> None:
        self._calls.pop(call, None)

    def watch_stall(self, call: Call) -> None:
        # where a direction of the call is blocked, each end will miss its pings at a moment of its own
        marks = self._marks(call)
        if any(marks):
            for at_client in (False, True):
                self.after(self.draw_detection_s(), self._notice_stall, call, marks, at_client)

    def _marks(self, call: Call) -> tuple[int, int]:
        one, other = call.client.name, call.server.name
        return self._blocked.get((one, other), 0), self._blocked.get((other, one), 0)

    def _notice_stall(self, call: Call, marks: tuple[int, int], at_client: bool) -> None:
        if all(mark == 0 or mark == now for mark, now in zip(marks, self._marks(call), strict=True)):
            call.miss_pings(at_client=at_client)


def unavailable(message: str) -> End:
    return failed(RpcError(Code.UNAVAILABLE, message))


def failed(error: ManyloraError) -> End:
    return End((error.code, message_of(error), encode_details(error)))
