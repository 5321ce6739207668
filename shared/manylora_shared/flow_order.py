"""Flows in the order of one key, and the first flow of each need. Pure; one writer, its owner.

A heap's entry is a lower bound. A flow has one valid entry, at or below its key; one whose key rises keeps its entry
and is moved when that surfaces, so that most changes of a key touch no heap at all. Only a key that falls below its
entry gets another one, and the entry left behind is dropped when it surfaces. Putting a flow and finding the first one
each cost O(log n), amortised; a heap is rebuilt when most of it was left behind.

A flow comes into the group of the unsorted, whatever its first item needs. Only `heads`, which is asked where the
first in order does not fit, sorts flows by their needs, as far as it is read; they stay so until they need something
else. So while there is room for all, needs cost nothing, and where room is short, no flow is looked at again and again.
Each group of a need has its own heap, and one more heap holds these groups by their first flow, as lower bounds too.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

_COMPACT_SLACK = 64
"""A heap is rebuilt once it has this many entries more than twice the valid ones."""
_FIRST_SHIFT = 40
_BEFORE_ALL = -(1 << 200)
_LEAST_IN_BUCKET = 16
_IN_BUCKET = 64
_MOST_IN_BUCKET = 256
"""Between these numbers of entries in the buckets of late, their width stays."""

F = TypeVar("F")


class Place(Generic[F]):
    """A flow's place in one order: places compare by `key`, then by `order`, which is unique. Written by the order."""

    __slots__ = ("entry", "flow", "group", "key", "need", "order")

    def __init__(self, flow: F, order: int) -> None:
        self.flow = flow
        self.order = order
        self.key = 0
        self.need: Hashable = None
        self.group: _Group[F] | None = None
        """None: it stands nowhere."""
        self.entry: _Entry[F] | None = None
        """The valid one in its group's heap. Entries are told apart by identity."""


_Entry = tuple[int, int, Place[F]]
"""(key, order, place)."""


class _Group(Generic[F]):
    """The flows of one need."""

    __slots__ = ("entry", "heap", "index", "need", "size")

    def __init__(self, need: Hashable, index: int) -> None:
        self.need = need
        self.index = index
        self.heap: list[_Entry[F]] = []
        self.size = 0
        """Flows that stand here; entries may be more."""
        self.entry: _GroupEntry[F] | None = None
        """While it has flows."""

    def enter(self, place: Place[F]) -> None:
        """Gives a place that stands here an entry at its key."""
        heap = self.heap
        place.entry = entry = (place.key, place.order, place)
        heappush(heap, entry)
        if len(heap) > 2 * self.size + _COMPACT_SLACK:
            heap[:] = [entry for entry in heap if entry is entry[2].entry]
            heapify(heap)

    def head(self) -> Place[F]:
        """The first place of a group that has some. Leaves it at the root, with an entry at its key."""
        heap = self.heap
        while True:
            entry = heap[0]
            place = entry[2]
            if entry is not place.entry:
                heappop(heap)
            elif entry[0] != place.key:
                place.entry = (place.key, place.order, place)
                heapreplace(heap, place.entry)
            else:
                return place

    def clear(self) -> None:
        self.heap.clear()

    def entries(self) -> Iterable[_Entry[F]]:
        """For checks."""
        return self.heap


class _Unsorted(_Group[F]):
    """All flows but those that were sorted by their needs: tens of thousands.

    A heap of so many is cold memory: an operation goes down fifteen levels of it, and was a quarter of a decision. So
    `heap` has the entries up to a *horizon* alone, some tens, and those beyond lie in buckets, by the upper bits of
    their keys and otherwise in no order. A bucket is looked through once, when the heap has run out: what was left
    behind goes, what has risen goes on to its own bucket, and the rest becomes the heap (as in a calendar queue: Brown
    1988; the buckets' width follows the number of entries that they are found to have).
    """

    __slots__ = ("_far", "_horizon", "_looked_through", "_num_entries", "_num_laid", "_num_loads", "_numbers",
                 "_shift")  # fmt: skip

    def __init__(self) -> None:
        super().__init__(None, 0)
        self._far: dict[int, list[_Entry[F]]] = {}
        self._numbers: list[int] = []
        """The buckets' numbers, a heap."""
        self._shift = _FIRST_SHIFT
        """An entry's bucket is its key without so many of its lower bits."""
        self._horizon = _BEFORE_ALL
        """The last bucket of which the entries are in the heap; later ones of lower keys go there too."""
        self._num_entries = 0
        self._num_laid = 0
        """Entries that were made since the buckets' width was last looked at. So are these counted:"""
        self._num_loads = 0
        self._looked_through = 0

    def enter(self, place: Place[F]) -> None:
        place.entry = entry = (place.key, place.order, place)
        self._num_entries += 1
        self._num_laid += 1
        self._lay(entry)
        if self._num_entries > 2 * self.size + _COMPACT_SLACK:
            self._lay_all_anew()

    def head(self) -> Place[F]:
        while True:
            if not self.heap:
                self._load()
                continue
            entry = self.heap[0]
            place = entry[2]
            if entry is not place.entry:
                heappop(self.heap)
                self._num_entries -= 1
            elif entry[0] != place.key:
                self._num_laid += 1
                if self._num_laid > 2 * self.size + _COMPACT_SLACK:
                    self._fit_width()  # so much happens in a bucket that is never through
                    continue
                place.entry = entry = (place.key, place.order, place)
                if place.key >> self._shift <= self._horizon:
                    heapreplace(self.heap, entry)
                else:
                    heappop(self.heap)
                    self._lay(entry)
            else:
                return place

    def is_beyond(self, key: int) -> bool:
        """Whether there may be flows before this key that are not in the heap."""
        return bool(self._far) and key >> self._shift > self._horizon

    @property
    def has_more(self) -> bool:
        """Whether there are entries that are not in the heap."""
        return bool(self._far)

    def extend(self) -> None:
        """Takes one more bucket, if there is one, into the heap."""
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

    def entries(self) -> Iterable[_Entry[F]]:
        return itertools.chain(self.heap, *self._far.values())

    def _lay(self, entry: _Entry[F]) -> None:
        number = entry[0] >> self._shift
        if number <= self._horizon:
            heappush(self.heap, entry)
            return
        bucket = self._far.get(number)
        if bucket is None:
            self._far[number] = [entry]
            heappush(self._numbers, number)
        else:
            bucket.append(entry)

    def _load(self) -> None:
        """The first bucket becomes the heap, which is empty."""
        if self._num_laid > self.size:
            self._fit_width()
        self._horizon = number = heappop(self._numbers)
        bucket, heap, shift = self._far.pop(number), self.heap, self._shift
        self._num_loads += 1
        self._looked_through += len(bucket)
        for entry in bucket:
            place = entry[2]
            if entry is not place.entry:
                self._num_entries -= 1
                continue
            key = place.key
            if key != entry[0]:
                place.entry = entry = (key, place.order, place)
                if key >> shift > number:
                    self._num_laid += 1
                    self._lay(entry)
                    continue
            heap.append(entry)
        heapify(heap)

    def _fit_width(self) -> None:
        """Makes buckets wider or narrower where those of late had too few or too many entries."""
        mean = max(self._looked_through // max(1, self._num_loads), len(self.heap))
        if mean > _MOST_IN_BUCKET and self._shift:
            self._shift = max(0, self._shift - (mean // _IN_BUCKET).bit_length())
            self._lay_all_anew()
        elif mean < _LEAST_IN_BUCKET <= self.size:
            self._shift += (_IN_BUCKET // max(1, mean)).bit_length()
            self._lay_all_anew()
        self._num_laid = self._num_loads = self._looked_through = 0

    def _lay_all_anew(self) -> None:
        """O(entries), as often as there were so many new ones."""
        places = [entry[2] for entry in self.entries() if entry is entry[2].entry]
        self.clear()
        self._num_entries = len(places)
        for place in places:
            place.entry = entry = (place.key, place.order, place)
            self._lay(entry)

    def check_invariants(self) -> None:
        assert self._num_entries == sum(1 for _ in self.entries())
        assert sorted(self._numbers) == sorted(self._far)
        assert all(number > self._horizon for number in self._far)
        assert all(entry[0] >> self._shift == number for number, bucket in self._far.items() for entry in bucket)
        assert all(entry[0] >> self._shift <= self._horizon for entry in self.heap)


_GroupEntry = tuple[int, int, int, _Group[F]]
"""(key, order, the group's index, group), of a place at or before the group's first. The unsorted have the index 0."""


class FlowOrder(Generic[F]):
    def __init__(self) -> None:
        self.unsorted: _Unsorted[F] = _Unsorted()
        """For reading. A place that stands there is `put` by its key and need alone while its key does not fall below
        its entry: a caller with many places may do that itself."""
        self._groups: dict[Hashable, _Group[F]] = {}
        """By need."""
        self._firsts: list[_GroupEntry[F]] = []
        self._next_index = 1
        self.size = 0
        """Places that stand here. For reading."""

    def put(self, place: Place[F], key: int, need: Hashable) -> None:
        """Gives a place its key and its need, or others. A place stands in one order at a time."""
        place.key, place.need = key, need
        group, entry = place.group, place.entry
        if group is None or entry is None:
            self.size += 1
            self._join(place, self.unsorted)
        elif group is not self.unsorted and group.need != need:
            self._leave(group)
            self._join(place, self.unsorted)
        elif key < entry[0]:
            group.enter(place)
            if group is not self.unsorted:
                self._show_if_first(group, place)

    def drop(self, place: Place[F]) -> None:
        """Takes a place out that stands here."""
        assert place.group is not None
        self.size -= 1
        self._leave(place.group)
        place.group = place.entry = None

    def first(self) -> Place[F] | None:
        """The first place of all."""
        sorted_first = self._first_of_sorted() if self._groups else None
        if not self.unsorted.size:
            return sorted_first
        place = self.unsorted.head()
        if sorted_first is None or (place.key, place.order) < (sorted_first.key, sorted_first.order):
            return place
        return sorted_first

    def _first_of_sorted(self) -> Place[F] | None:
        firsts = self._firsts
        while firsts:
            shown = firsts[0]
            group = shown[3]
            if shown is not group.entry:
                heappop(firsts)
                continue
            place = group.head()
            if place.key != shown[0] or place.order != shown[1]:
                group.entry = shown = (place.key, place.order, group.index, group)
                heapreplace(firsts, shown)
                if firsts[0] is not shown:
                    continue
            return place
        return None

    def heads(self) -> Iterator[Place[F]]:
        """The first place of every need, in order. Nothing may be changed meanwhile."""
        unsorted, firsts = self.unsorted, self._firsts.copy()
        done: set[int] = set()
        if unsorted.size:
            heappush(firsts, _bound(unsorted, unsorted.head()))
        while firsts:
            key, order, index, group = shown = heappop(firsts)
            if group is unsorted:
                place = unsorted.head()
                self._leave(unsorted)
                heappush(firsts, self._sort_in(place))
                if unsorted.size:
                    heappush(firsts, _bound(unsorted, unsorted.head()))
            elif shown is group.entry and index not in done:
                place = group.head()
                if place.key != key or place.order != order:
                    heappush(firsts, self._show(group, place))
                else:
                    done.add(index)
                    yield place

    def first_places(self, limit: int) -> list[Place[F]]:
        """The first `limit` places, whatever they need, in order: O(needs + limit log limit), but for entries that were
        left behind or are below their keys."""
        while (found := self._walk(limit)) is None:
            self.unsorted.extend()
        return found

    def _walk(self, limit: int) -> list[Place[F]] | None:
        """The first places; None: there may be others before them that are not in the heap of the unsorted."""
        # Each heap is walked from its root: an entry's children are no smaller than itself.
        unsorted = self.unsorted
        groups = (unsorted, *self._groups.values())
        front = [(*group.heap[0][:2], group.index, 0, group) for group in groups if group.heap]
        heapify(front)
        risen: dict[tuple[int, int], Place[F]] = {}
        found: list[Place[F]] = []
        while front and len(found) < limit:
            key, order, index, at, group = heappop(front)
            if unsorted.is_beyond(key):
                return None
            if at < 0:
                found.append(risen[key, order])
                continue
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(group.heap):
                    heappush(front, (*group.heap[child][:2], index, child, group))
            entry = group.heap[at]
            place = entry[2]
            if place.entry is entry:
                if place.key == key:
                    found.append(place)
                else:
                    risen[place.key, order] = place
                    heappush(front, (place.key, order, index, -1, group))
        return found if len(found) == limit or not unsorted.has_more else None

    def _join(self, place: Place[F], group: _Group[F]) -> None:
        group.size += 1
        place.group = group
        group.enter(place)

    def _sort_in(self, place: Place[F]) -> _GroupEntry[F]:
        """Puts a place that has left the unsorted into the group of its need; returns the group's entry."""
        group = self._groups.get(place.need)
        if group is None:
            group = self._groups[place.need] = _Group(place.need, self._next_index)
            self._next_index += 1
        self._join(place, group)
        return self._show_if_first(group, place)

    def _leave(self, group: _Group[F]) -> None:
        group.size -= 1
        if not group.size:
            group.clear()
            if group is not self.unsorted:
                group.entry = None
                del self._groups[group.need]

    def _show_if_first(self, group: _Group[F], place: Place[F]) -> _GroupEntry[F]:
        """Brings the group's entry down to one of its places; returns it."""
        shown = group.entry
        if shown is None or (place.key, place.order) < shown[:2]:
            return self._show(group, place)
        return shown

    def _show(self, group: _Group[F], first: Place[F]) -> _GroupEntry[F]:
        """Gives a group the entry of its first place; returns it."""
        shown = group.entry = _bound(group, first)
        heappush(self._firsts, shown)
        if len(self._firsts) > 2 * len(self._groups) + _COMPACT_SLACK:
            self._firsts = [g.entry for g in self._groups.values() if g.entry is not None]
            heapify(self._firsts)
        return shown

    def check_invariants(self) -> None:
        assert sum(group.size for group in self._groups.values()) + self.unsorted.size == self.size
        assert all(group.size for group in self._groups.values())
        for group in (self.unsorted, *self._groups.values()):
            valid = [entry for entry in group.entries() if entry is entry[2].entry]
            assert len(valid) == group.size
            assert all(entry[0] <= entry[2].key and entry[2].group is group for entry in valid)
            if isinstance(group, _Unsorted):
                group.check_invariants()
            else:
                assert all(entry[2].need == group.need for entry in valid)
                assert group.entry in self._firsts
                assert group.entry is not None
                assert group.entry[:2] <= min(entry[:2] for entry in valid), "a group without a way to its first flow"


def _bound(group: _Group[F], first: Place[F]) -> _GroupEntry[F]:
    return first.key, first.order, group.index, group
