"""Flows by one key: those of one need in a heap, all others in buckets. Pure; written by their `FlowOrder` alone."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

COMPACT_SLACK = 64  # A heap is rebuilt once it has this many entries more than twice the valid ones.
_FIRST_SHIFT = 40  # buckets of one unit of cost at weight 1, until it is seen how close the keys are
_BEFORE_ALL = -(1 << 200)
_LEAST_IN_BUCKET = 64
_IN_BUCKET = 256
_MOST_IN_BUCKET = 1024  # between these numbers of entries in a bucket the width stays
_MOST_NARROWED = 3  # bits at a time

F = TypeVar("F")


class Place(Generic[F]):
    """A flow's place in one order: places compare by `key`, then by `order`, which is unique."""

    __slots__ = ("entry", "floor", "flow", "group", "key", "need", "order")

    def __init__(self, flow: F, order: int) -> None:
        self.flow = flow
        self.order = order
        self.key = 0
        self.need: Hashable = None
        self.group: Group[F] | None = None
        self.entry: Any = None  # the valid `Entry` in its group's heap, or the bucket that it lies in
        self.floor = 0  # the least key for which that will do


Entry = Any  # (key, order, place), told from others by identity: mypyc would copy a tuple of known types


def _entry(place: Place[F]) -> Entry:
    return place.key, place.order, place


class _Bucket(Generic[F]):
    __slots__ = ("floor", "places")

    def __init__(self, floor: int) -> None:
        self.floor = floor  # one number for all places: each place's own would be cold
        self.places: list[Place[F]] = []


class Group(Generic[F]):
    __slots__ = ("entry", "heap", "index", "need", "size")

    def __init__(self, need: Hashable, index: int) -> None:
        self.need = need
        self.index = index
        self.heap: list[Entry] = []
        self.size = 0  # entries may be more
        self.entry: GroupEntry = None

    def enter(self, place: Place[F]) -> None:
        heap = self.heap
        place.floor = place.key
        place.entry = entry = _entry(place)
        heappush(heap, entry)
        if len(heap) > 2 * self.size + COMPACT_SLACK:
            heap[:] = [entry for entry in heap if entry is entry[2].entry]
            heapify(heap)

    def head(self) -> Place[F]:
        """Leaves it at the root, with an entry at its key."""
        heap = self.heap
        while True:
            entry = heap[0]
            place: Place[F] = entry[2]
            if entry is not place.entry:
                heappop(heap)
            elif entry[0] != place.key:
                place.floor = place.key
                place.entry = entry = _entry(place)
                heapreplace(heap, entry)
            else:
                return place

    def clear(self) -> None:
        self.heap.clear()

    def valid(self) -> list[Place[F]]:
        # in no order
        return [entry[2] for entry in self.heap if entry is entry[2].entry]


class Unsorted(Group[F]):
    """All flows that were not sorted by their needs: a calendar queue (Brown 1988).

    `heap`, kept small to stay in warm memory, has the entries up to a horizon; the rest lie in buckets.
    """

    __slots__ = ("_far", "_horizon", "_looked_through", "_num_entries", "_num_laid", "_num_loads", "_numbers",
                 "_shift")  # fmt: skip

    def __init__(self) -> None:
        super().__init__(None, 0)
        self._far: dict[int, _Bucket[F]] = {}
        self._numbers: list[int] = []  # a heap
        self._shift = _FIRST_SHIFT  # a bucket's number is the key without so many of its lower bits
        self._horizon = _BEFORE_ALL  # the last bucket of which the entries are in the heap
        self._num_entries = 0
        self._num_laid = 0  # since the width was last looked at, as the next two
        self._num_loads = 0
        self._looked_through = 0

    def enter(self, place: Place[F]) -> None:
        self._num_entries += 1
        self._num_laid += 1
        self._lay(place)
        if self._num_entries > 2 * self.size + COMPACT_SLACK:
            self._lay_all_anew()

    def head(self) -> Place[F]:
        heap = self.heap
        while True:
            if not heap:
                if self._num_laid > self.size:
                    self._fit_width()
                self._load()
                continue
            entry = heap[0]
            place: Place[F] = entry[2]
            key = place.key
            if entry is not place.entry:
                heappop(heap)
                self._num_entries -= 1
            elif key == entry[0]:
                return place
            else:
                self._num_laid = laid = self._num_laid + 1
                if laid > 2 * self.size + COMPACT_SLACK:
                    self._fit_width()  # so much happens in a bucket that is never through
                elif key >> self._shift <= self._horizon:
                    place.floor = key
                    place.entry = entry = _entry(place)
                    heapreplace(heap, entry)
                else:
                    heappop(heap)
                    self._lay(place)

    def is_beyond(self, key: int) -> bool:
        """Whether there may be flows before this key that are not in the heap."""
        return bool(self._far) and key >> self._shift > self._horizon

    @property
    def has_more(self) -> bool:
        return bool(self._far)

    def extend(self) -> None:
        if not self._far:
            return
        before, self.heap = self.heap, []
        self._load()
        self.heap += before
        heapify(self.heap)

    def clear(self) -> None:
        self.heap.clear()
        self._far.clear()
        self._numbers.clear()
        self._horizon = _BEFORE_ALL
        self._num_entries = 0

    def valid(self) -> list[Place[F]]:
        laid = [place for bucket in self._far.values() for place in bucket.places if place.entry is bucket]
        return list(dict.fromkeys(itertools.chain(super().valid(), laid)))

    def _lay(self, place: Place[F]) -> None:
        key = place.key
        number = key >> self._shift
        if number <= self._horizon:
            place.floor = key
            place.entry = entry = _entry(place)
            heappush(self.heap, entry)
            return
        bucket = self._far.get(number)
        if bucket is None:
            bucket = self._far[number] = _Bucket(number << self._shift)
            heappush(self._numbers, number)
        bucket.places.append(place)
        place.entry = bucket
        place.floor = bucket.floor

    def _load(self) -> None:
        # The first bucket becomes the heap, which is empty.
        self._horizon = number = heappop(self._numbers)
        bucket, heap, shift = self._far.pop(number), self.heap, self._shift
        self._num_loads += 1
        self._looked_through += len(bucket.places)
        for place in bucket.places:
            if place.entry is not bucket:
                self._num_entries -= 1
                continue
            key = place.key
            if key >> shift > number:
                self._num_laid += 1
                self._lay(place)
                continue
            place.floor = key
            place.entry = entry = _entry(place)
            heap.append(entry)
        heapify(heap)

    def _fit_width(self) -> None:
        mean = max(self._looked_through // max(1, self._num_loads), len(self.heap))
        if mean > _MOST_IN_BUCKET and self._shift:
            # In small steps: many equal keys, as at a start, fill one bucket of any width, and soon spread.
            self._shift = max(0, self._shift - min(_MOST_NARROWED, (mean // _IN_BUCKET).bit_length()))
            self._lay_all_anew()
        elif mean < _LEAST_IN_BUCKET <= self.size:
            self._shift += (_IN_BUCKET // max(1, mean)).bit_length()
            self._lay_all_anew()
        self._num_laid = self._num_loads = self._looked_through = 0

    def _lay_all_anew(self) -> None:
        # O(entries), as often as there were so many new ones
        places = self.valid()
        self.clear()
        self._num_entries = len(places)
        for place in places:
            self._lay(place)

    def check_invariants(self) -> None:
        assert self._num_entries == len(self.heap) + sum(len(bucket.places) for bucket in self._far.values())
        assert sorted(self._numbers) == sorted(self._far)
        assert all(number > self._horizon for number in self._far)
        for number, bucket in self._far.items():
            assert all(place.key >> self._shift >= number for place in bucket.places if place.entry is bucket)
        assert all(entry[0] >> self._shift <= self._horizon for entry in self.heap)


GroupEntry = Any  # (key, order, index, group) of a place at or before the group's first; the unsorted have index 0
