"""Flows in the order of one key, and the first flow of each need. Pure; one writer, its owner.

Each flow has one valid entry, at or below its key, which is moved when it surfaces. Only `heads` sorts flows by need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from manylora_shared.fairness.flow_group import COMPACT_SLACK, Group, GroupEntry, Place, Unsorted

F = TypeVar("F")


class FlowOrder(Generic[F]):
    def __init__(self) -> None:
        # A caller may do `put` itself for a place that stands here: key and need, and `enter` if the key is below its
        # floor.
        self.unsorted: Unsorted[F] = Unsorted()
        self._groups: dict[Hashable, Group[F]] = {}  # by need
        self._firsts: list[GroupEntry] = []
        self._next_index = 1
        self.size = 0

    def put(self, place: Place[F], key: int, need: Hashable) -> None:
        # A place stands in one order at a time.
        place.key, place.need = key, need
        group = place.group
        if group is None:
            self.size += 1
            self._join(place, self.unsorted)
        elif group is not self.unsorted and group.need != need:
            self._leave(group)
            self._join(place, self.unsorted)
        elif key < place.floor:
            group.enter(place)
            if group is not self.unsorted:
                self._show_if_first(group, place)

    def drop(self, place: Place[F]) -> None:
        assert place.group is not None
        self.size -= 1
        self._leave(place.group)
        place.group = place.entry = None

    def first(self) -> Place[F] | None:
        if not self._groups:
            return self.unsorted.head() if self.unsorted.size else None
        sorted_first = self._first_of_sorted()
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
            group: Group[F] = shown[3]
            if shown is not group.entry:
                heappop(firsts)
                continue
            place = group.head()
            if place.key != shown[0] or place.order != shown[1]:
                group.entry = shown = _bound(group, place)
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
            shown = heappop(firsts)
            key, order, index, group = shown
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
        """Whatever they need, in order: O(needs + limit log limit) beside stale entries."""
        while (found := self._walk(limit)) is None:
            self.unsorted.extend()
        return found

    def _walk(self, limit: int) -> list[Place[F]] | None:
        """None: others that are not in the heap of the unsorted may come before them."""
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

    def _join(self, place: Place[F], group: Group[F]) -> None:
        group.size += 1
        place.group = group
        group.enter(place)

    def _sort_in(self, place: Place[F]) -> GroupEntry:
        """Returns the group's entry."""
        group = self._groups.get(place.need)
        if group is None:
            group = self._groups[place.need] = Group(place.need, self._next_index)
            self._next_index += 1
        self._join(place, group)
        return self._show_if_first(group, place)

    def _leave(self, group: Group[F]) -> None:
        group.size -= 1
        if not group.size:
            group.clear()
            if group is not self.unsorted:
                group.entry = None
                del self._groups[group.need]

    def _show_if_first(self, group: Group[F], place: Place[F]) -> GroupEntry:
        shown = group.entry
        if shown is None or (place.key, place.order) < shown[:2]:
            return self._show(group, place)
        return shown

    def _show(self, group: Group[F], first: Place[F]) -> GroupEntry:
        shown = group.entry = _bound(group, first)
        heappush(self._firsts, shown)
        if len(self._firsts) > 2 * len(self._groups) + COMPACT_SLACK:
            self._firsts = [g.entry for g in self._groups.values() if g.entry is not None]
            heapify(self._firsts)
        return shown

    def check_invariants(self) -> None:
        assert sum(group.size for group in self._groups.values()) + self.unsorted.size == self.size
        assert all(group.size for group in self._groups.values())
        for group in (self.unsorted, *self._groups.values()):
            valid = group.valid()
            assert len(valid) == group.size
            assert all(place.floor <= place.key and place.group is group for place in valid)
            if isinstance(group, Unsorted):
                group.check_invariants()
            else:
                assert all(place.need == group.need for place in valid)
                assert group.entry in self._firsts
                assert group.entry is not None
                first = min((place.floor, place.order) for place in valid)
                assert group.entry[:2] <= first, "a group without a way to its first flow"


def _bound(group: Group[F], first: Place[F]) -> GroupEntry:
    return first.key, first.order, group.index, group
