"""Each adapter's own order of the workers: a hash ring (consistent hashing: Karger et al. 1997). Pure; keeps only its
members and a cache of hashes. A worker that comes or goes moves only what it gets or had.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from manylora_shared.ids import AdapterKey, WorkerId

POINTS_PER_WORKER = 32
_MAX_CACHED_HASHES = 65_536
_CIRCLE = 1 << 64


class Ring:
    def __init__(self) -> None:
        self._points: list[tuple[int, WorkerId]] = []
        self._points_of: dict[WorkerId, list[int]] = {}
        self._hashes: dict[AdapterKey, int] = {}

    def add(self, worker_id: WorkerId) -> None:
        points = sorted(_hash(f"{worker_id}|{i}") for i in range(POINTS_PER_WORKER))
        self._points_of[worker_id] = points
        for point in points:
            insort(self._points, (point, worker_id))

    def remove(self, worker_id: WorkerId) -> None:
        for point in self._points_of.pop(worker_id):
            del self._points[bisect_left(self._points, (point, worker_id))]

    def walk(self, uid: AdapterKey) -> Iterator[WorkerId]:
        begin = bisect_right(self._points, (self._hash_of(uid), WorkerId("")))
        seen: set[WorkerId] = set()
        for i in range(len(self._points)):
            worker_id = self._points[begin + i - len(self._points)][1]
            if worker_id not in seen:
                seen.add(worker_id)
                yield worker_id

    def distance(self, uid: AdapterKey, worker_id: WorkerId) -> int:
        at, points = self._hash_of(uid), self._points_of[worker_id]
        return (points[bisect_left(points, at) % len(points)] - at) % _CIRCLE

    def _hash_of(self, uid: AdapterKey) -> int:
        found = self._hashes.get(uid)
        if found is None:
            if len(self._hashes) >= _MAX_CACHED_HASHES:
                self._hashes.clear()
            found = self._hashes[uid] = _hash(uid)
        return found


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
