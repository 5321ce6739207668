"""Flows in the order of one key, grouped by what starting their first item needs. Pure; one writer, its owner.

Two levels of heaps: each group holds its flows, and one heap holds the groups by their first flow. Entries are left
behind when a flow moves and skipped when they surface, so that moving a flow and finding the first one each cost
O(log n); a heap is rebuilt when most of it is stale.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

_COMPACT_SLACK = 64
"""A heap is rebuilt once it has this many entries more than twice the live ones."""

F = TypeVar("F", bound=Hashable)


Place = tuple[int, int, F]
"""(key, order, flow): a flow's place. Places compare by key, then by `order`, which is unique. Plain tuples: there are
several a decision."""


class _Group(Generic[F]):
    __slots__ = ("heap", "index", "need", "size")

    def __init__(self, need: Hashable, index: int) -> None:
        self.need = need
        self.index = index
        self.heap: list[Place[F]] = []
        self.size = 0
        """Flows that stand here; `heap` may hold more."""


class FlowOrder(Generic[F]):
    def __init__(self) -> None:
        self._places: dict[F, tuple[Place[F], _Group[F]]] = {}
        self._groups: dict[Hashable, _Group[F]] = {}
        self._firsts: list[tuple[int, int, int, _Group[F]]] = []
        """(key, order, group's index, group); every group's true first has an entry here."""
        self._next_index = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, flow: F) -> bool:
        return flow in self._places

    def put(self, flow: F, key: int, order: int, need: Hashable) -> None:
        """Gives a flow its place, or another one."""
        before = self._places.get(flow)
        if before is not None and before[1].need == need:
            group = before[1]
            place = before[0]
            if place[0] == key and place[1] == order:
                return
        else:
            found = self._groups.get(need)
            if found is None:
                found = self._groups[need] = _Group(need, self._next_index)
                self._next_index += 1
            group = found
            group.size += 1
            if before is not None:
                self._leave(before[1])
        place = (key, order, flow)
        self._places[flow] = (place, group)
        heap = group.heap
        heapq.heappush(heap, place)
        if heap[0] is place:
            self._note_first(group)
        elif len(heap) > 2 * group.size + _COMPACT_SLACK:
            group.heap = [entry for entry in dict.fromkeys(heap) if self._stands(entry, group)]
            heapq.heapify(group.heap)

    def drop(self, flow: F) -> None:
        """Takes a flow out; one that is not in is ignored."""
        before = self._places.pop(flow, None)
        if before is not None:
            self._leave(before[1])

    def first(self) -> tuple[Place[F], Hashable] | None:
        """The first flow of all, and its need."""
        firsts, places = self._firsts, self._places
        while firsts:
            key, order, _, group = firsts[0]
            heap = group.heap
            if heap:
                head = heap[0]
                found = places.get(head[2])
                # The common case without a call: the group's first entry is no stale one, and is the one shown here.
                if found is not None and found[0] is head and head[1] == order and head[0] == key:
                    return head, group.need
            first = self._head(group)
            if first is not None and first[1] == order and first[0] == key:
                return first, group.need
            heapq.heappop(firsts)
            if first is not None:
                self._note_first(group)
        return None

    def heads(self) -> Iterator[tuple[Place[F], Hashable]]:
        """The first flow of every need, in order. Nothing may be changed meanwhile."""
        firsts = self._firsts.copy()
        last: Place[F] | None = None
        while firsts:
            key, order, index, group = heapq.heappop(firsts)
            head = self._head(group)
            if head is None or head is last:
                continue
            if head[:2] != (key, order):
                heapq.heappush(firsts, (head[0], head[1], index, group))
                continue
            last = head
            yield head, group.need

    def first_flows(self, limit: int) -> list[Place[F]]:
        """The first `limit` flows, whatever they need, in order: O(needs + limit log limit), but for stale entries."""
        # Each heap is walked from its root: an entry's children are no smaller than itself.
        front = [(group.heap[0], group.index, 0, group) for group in self._groups.values() if group.heap]
        heapq.heapify(front)
        found: list[Place[F]] = []
        while front and len(found) < limit:
            place, index, at, group = heapq.heappop(front)
            if self._stands(place, group) and (not found or found[-1] != place):
                found.append(place)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(group.heap):
                    heapq.heappush(front, (group.heap[child], index, child, group))
        return found

    def _leave(self, group: _Group[F]) -> None:
        group.size -= 1
        if not group.size:
            group.heap.clear()
            if self._groups.get(group.need) is group:
                del self._groups[group.need]

    def _stands(self, entry: Place[F], group: _Group[F]) -> bool:
        found = self._places.get(entry[2])
        return found is not None and found[1] is group and found[0] == entry

    def _head(self, group: _Group[F]) -> Place[F] | None:
        heap, places = group.heap, self._places
        while heap:
            place = heap[0]
            found = places.get(place[2])
            if found is not None and found[1] is group and found[0] == place:
                return place
            heapq.heappop(heap)
        return None

    def _note_first(self, group: _Group[F]) -> None:
        head = group.heap[0]
        heapq.heappush(self._firsts, (head[0], head[1], group.index, group))
        if len(self._firsts) > 2 * len(self._groups) + _COMPACT_SLACK:
            heads = [(first, g) for g in self._groups.values() if (first := self._head(g)) is not None]
            self._firsts = [(first[0], first[1], g.index, g) for first, g in heads]
            heapq.heapify(self._firsts)

    def check_invariants(self) -> None:
        assert sum(group.size for group in self._groups.values()) == len(self._places)
        shown = {(key, order, id(group)) for key, order, _, group in self._firsts}
        for group in self._groups.values():
            head = self._head(group)
            assert head is not None
            assert (head[0], head[1], id(group)) in shown or any(
                entry[3] is group and entry[:2] < head[:2] for entry in self._firsts
            ), "a group without a way to its first flow"
        for place, group in self._places.values():
            assert place in group.heap
            assert self._groups[group.need] is group
