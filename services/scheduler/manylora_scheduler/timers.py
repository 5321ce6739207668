"""Named moments in the future. Owns which are set; knows no clock: the owner asks for what is due."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_COMPACT_SLACK = 64
"""Everything is rebuilt once there are this many entries more than twice the set timers."""


class Timers(Generic[K]):
    """A set of (key, moment); setting a key again moves it. Ties are due in the order of setting.

    Moments of any kind stand in a heap. Those that are a fixed delay from now stand in a lane of that delay, where they
    are in order by themselves: most timers are such, and are cancelled long before they are due.
    """

    def __init__(self) -> None:
        self._set: dict[K, tuple[float, int, K]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._lanes: dict[float, deque[tuple[float, int, K]]] = {}
        self._num_entries = 0
        """In the heap and the lanes, stale ones included."""
        self._next_order = 0
        self.not_before = math.inf
        """For reading: no timer is due before, so nothing needs to be looked at until then."""

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
        """Unsets a key; one that is not set is ignored."""
        self._set.pop(key, None)

    def next_at(self) -> float | None:
        """When the next timer is due."""
        first = self._first()
        return first[0] if first is not None else None

    def pop_due(self, now: float) -> K | None:
        """Unsets and returns the earliest timer that is due at `now`."""
        if now < self.not_before:
            return None
        first = self._first()
        if first is None or first[0] > now:
            return None
        del self._set[first[2]]
        return first[2]

    def _entry(self, key: K, at: float) -> tuple[float, int, K]:
        if self._num_entries > 2 * len(self._set) + _COMPACT_SLACK:
            self._compact()
        entry = self._set[key] = (at, self._next_order, key)
        self._next_order += 1
        self._num_entries += 1
        if at < self.not_before:
            self.not_before = at
        return entry

    def _first(self) -> tuple[float, int, K] | None:
        """The earliest entry that is set. Takes stale ones off the ends on the way."""
        first: tuple[float, int, K] | None = None
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
