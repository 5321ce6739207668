"""Moments in the future: by name (`Timers`), and one for each of very many things (`Moments`). Pure; they know no
clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_COMPACT_SLACK = 64  # Everything is rebuilt once there are so many entries more than twice the set timers.

_Entry = Any  # (moment, order, key), told from others by its identity, as `flow_group.Entry`


class Timers(Generic[K]):
    """A set of (key, moment); setting a key again moves it. Ties are due in the order of setting.

    Moments that are a fixed delay from now stand in a lane of that delay, all others in a heap.
    """

    def __init__(self) -> None:
        self._set: dict[K, _Entry] = {}
        self._heap: list[_Entry] = []
        self._lanes: dict[float, deque[_Entry]] = {}
        self._num_entries = 0  # stale ones included
        self._next_order = 0
        self.not_before = math.inf  # for reading: no timer is due before

    def __len__(self) -> int:
        return len(self._set)

    def __contains__(self, key: K) -> bool:
        return key in self._set

    def set(self, key: K, at: float) -> None:
        heapq.heappush(self._heap, self._entry(key, at))

    def set_after(self, key: K, now: float, delay_s: float) -> None:
        """As `set` at now + delay_s. `now` never falls; there are few different delays."""
        lane = self._lanes.get(delay_s)
        if lane is None:
            lane = self._lanes[delay_s] = deque()
        lane.append(self._entry(key, now + delay_s))

    def cancel(self, key: K) -> None:
        # One that is not set is ignored.
        self._set.pop(key, None)

    def next_at(self) -> float | None:
        first = self._first()
        return first[0] if first is not None else None

    def pop_due(self, now: float) -> K | None:
        """Unsets and returns the earliest that is due."""
        if now < self.not_before:
            return None
        first = self._first()
        if first is None or first[0] > now:
            return None
        key: K = first[2]
        del self._set[key]
        return key

    def _entry(self, key: K, at: float) -> _Entry:
        if self._num_entries > 2 * len(self._set) + _COMPACT_SLACK:
            self._compact()
        entry = self._set[key] = _made(at, self._next_order, key)
        self._next_order += 1
        self._num_entries += 1
        if at < self.not_before:
            self.not_before = at
        return entry

    def _first(self) -> _Entry:
        """None: there is none. Takes stale entries off the ends on the way."""
        first: _Entry = None
        for lane in self._lanes.values():
            while lane and self._set.get(lane[0][2]) is not lane[0]:
                lane.popleft()
                self._num_entries -= 1
            if lane and (first is None or lane[0][:2] < first[:2]):
                first = lane[0]
        while self._heap and self._set.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
            self._num_entries -= 1
        if self._heap and (first is None or self._heap[0][:2] < first[:2]):
            first = self._heap[0]
        self.not_before = first[0] if first is not None else math.inf
        return first

    def _compact(self) -> None:
        for lane in self._lanes.values():
            # In its place: the garbage collector walks what is new, and a lane may be long.
            for _ in range(len(lane)):
                entry = lane.popleft()
                if self._set.get(entry[2]) is entry:
                    lane.append(entry)
        self._heap = [entry for entry in self._heap if self._set.get(entry[2]) is entry]
        heapq.heapify(self._heap)
        self._num_entries = len(self._heap) + sum(map(len, self._lanes.values()))


def _made(at: float, order: int, key: Hashable) -> _Entry:
    return at, order, key


class Timed:
    """What can wait for one moment; its `Moments` writes this."""

    __slots__ = ("due_in", "due_slot", "waits_from")

    due_in: _Lane[Any] | list[Any] | None  # a lane, or its entry in the heap; None: it waits for nothing
    due_slot: int
    waits_from: float  # in a lane: its moment is the lane's delay later


T = TypeVar("T", bound=Timed)

_HOLES = 4  # places for each thing in a lane, beyond which it is closed up


class _Lane(Generic[T]):
    """Things in the order of their moments, and holes where one was cancelled."""

    __slots__ = ("delay_s", "front", "num_waiting", "things")

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.things: list[T | None] = []
        self.front = 0  # in `things`: before it are only holes
        self.num_waiting = 0

    def first(self) -> T | None:
        if not self.num_waiting:
            return None
        while (thing := self.things[self.front]) is None:
            self.front += 1
        return thing

    def close_up(self) -> None:
        self.things = [thing for thing in self.things if thing is not None]
        self.front = 0
        for slot, thing in enumerate(self.things):
            assert thing is not None
            thing.due_slot = slot


class Moments(Generic[T]):
    """As `Timers`, with one moment for each thing, kept in the thing itself: for ten thousands, nearly all cancelled.

    Of equal moments the lanes' are due first.
    """

    def __init__(self) -> None:
        self._lanes: dict[float, _Lane[T]] = {}
        self._heap: list[list[Any]] = []  # [at, order, thing]; None in place of a thing that waits no more
        self._num_in_heap = 0
        self._next_order = 0
        self.not_before = math.inf  # for reading: nothing is due before

    def __len__(self) -> int:
        return self._num_in_heap + sum(lane.num_waiting for lane in self._lanes.values())

    def __iter__(self) -> Iterator[T]:
        for lane in self._lanes.values():
            for thing in lane.things:
                if thing is not None:
                    yield thing
        for _, _, thing in self._heap:
            if thing is not None:
                yield thing

    def set(self, thing: T, at: float) -> None:
        if thing.due_in is not None:
            self.cancel(thing)
        thing.due_in = entry = [at, self._next_order, thing]
        self._next_order += 1
        self._num_in_heap += 1
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * self._num_in_heap + _COMPACT_SLACK:
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapq.heapify(self._heap)
        if at < self.not_before:
            self.not_before = at

    def set_after(self, thing: T, now: float, delay_s: float) -> None:
        """As `set` at now + delay_s. `now` never falls; there are few different delays."""
        if thing.due_in is not None:
            self.cancel(thing)
        lane = self._lanes.get(delay_s)
        if lane is None:
            lane = self._lanes[delay_s] = _Lane(delay_s)
        things = lane.things
        thing.waits_from = now
        thing.due_in = lane
        thing.due_slot = slot = len(things)
        things.append(thing)
        lane.num_waiting = waiting = lane.num_waiting + 1
        if slot > _HOLES * waiting + _COMPACT_SLACK:
            lane.close_up()
        if waiting == 1 and now + delay_s < self.not_before:  # otherwise one before it in the lane is due no later
            self.not_before = now + delay_s

    def cancel(self, thing: T) -> None:
        # A thing that waits for nothing is ignored.
        place = thing.due_in
        if place is None:
            return
        thing.due_in = None
        if isinstance(place, list):
            place[2] = None
            self._num_in_heap -= 1
        else:
            place.things[thing.due_slot] = None
            place.num_waiting -= 1

    def next_at(self) -> float | None:
        return self.not_before if self._first() is not None else None

    def pop_due(self, now: float) -> T | None:
        """Cancels and returns what is due first, if it is due."""
        if now < self.not_before:
            return None
        first = self._first()
        if first is None or self.not_before > now:
            return None
        self.cancel(first)
        return first

    def _first(self) -> T | None:
        # `not_before` is its moment.
        first, due_at = None, math.inf
        for lane in self._lanes.values():
            thing = lane.first()
            if thing is not None and (first is None or thing.waits_from + lane.delay_s < due_at):
                first, due_at = thing, thing.waits_from + lane.delay_s
        heap = self._heap
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        if heap and (first is None or heap[0][0] < due_at):
            due_at, _, first = heap[0]
        self.not_before = due_at
        return first


def earlier(one: float | None, other: float | None) -> float | None:
    # None is a moment that never comes.
    if one is None or (other is not None and other < one):
        return other
    return one
