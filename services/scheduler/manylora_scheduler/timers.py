"""Named moments in the future. Owns which are set; knows no clock: the owner asks for what is due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_COMPACT_SLACK = 64
"""The heap is rebuilt once it has this many entries more than twice the set timers."""


class Timers(Generic[K]):
    """A set of (key, moment); setting a key again moves it. Ties are due in the order of setting."""

    def __init__(self) -> None:
        self._set: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._set)

    def __contains__(self, key: K) -> bool:
        return key in self._set

    def set(self, key: K, at: float) -> None:
        self._set[key] = (at, self._next_order)
        heapq.heappush(self._heap, (at, self._next_order, key))
        self._next_order += 1
        if len(self._heap) > 2 * len(self._set) + _COMPACT_SLACK:
            self._heap = [(at, order, key) for key, (at, order) in self._set.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Unsets a key; one that is not set is ignored."""
        self._set.pop(key, None)

    def next_at(self) -> float | None:
        """When the next timer is due."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> K | None:
        """Unsets and returns the earliest timer that is due at `now`."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._set[key]
        return key

    def _drop_stale(self) -> None:
        while self._heap and self._set.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
