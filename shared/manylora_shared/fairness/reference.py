"""The rules of seam.py in their shortest form, for some hundred flows. A choice costs O(flows).

Pure; one writer, its owner. Knows no boosts and no counters.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from manylora_shared.fairness.seam import TAG_SCALE, Pick, Rank, Share

F = TypeVar("F", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P")


class Flow(Generic[F, I]):
    __slots__ = ("inverse", "key", "num_running", "order", "queue", "reserved", "settled", "unspent")

    def __init__(self, key: F, order: int) -> None:
        self.key = key
        self.order = order
        self.inverse = TAG_SCALE
        self.settled = 0
        self.reserved = 0
        self.num_running = 0
        self.queue: list[tuple[Rank, int, I]] = []
        self.unspent: dict[I, int] = {}  # what running items have reserved

    @property
    def tag(self) -> int:
        return self.settled + self.reserved * self.inverse

    @property
    def num_queued(self) -> int:
        return len(self.queue)


class ReferenceQueue(Generic[F, I]):
    def __init__(self) -> None:
        self.virtual_time = 0
        self.books: dict[F, Flow[F, I]] = {}
        self._idle: dict[F, Flow[F, I]] = {}  # those without items, whose tags V has not come to
        self._queued: dict[I, tuple[Flow[F, I], tuple[Rank, int, I]]] = {}
        self._running: dict[I, Flow[F, I]] = {}
        self._num_flows_seen = self._num_pushed = 0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def tag_of(self, flow: F) -> int:
        found = self.books.get(flow)
        return found.tag if found is not None else self.virtual_time

    def has_come_as_far(self, flow: F, as_other: F) -> bool:
        found, other = self.books.get(flow), self.books.get(as_other)
        return found is not None and found.tag >= (self.virtual_time if other is None else other.settled)

    def reserved_by(self, flow: F) -> int:
        return self.books[flow].reserved if flow in self.books else 0

    def queued_in(self, flow: F) -> int:
        return len(self.books[flow].queue) if flow in self.books else 0

    def push(self, item: I, flow: F, *, share: Share, rank: Rank) -> None:
        assert item not in self._queued
        assert item not in self._running
        is_newcomer = not self.queued_in(flow)
        if is_newcomer:
            self._catch_up(flow)
        found = self.remember(flow, share)
        if is_newcomer:
            self._lift(found)
        self._num_pushed += 1
        entry = (rank, self._num_pushed, item)
        insort(found.queue, entry)
        self._queued[item] = found, entry

    def remove(self, item: I) -> None:
        self._rest(self._take(item))

    def in_order(self) -> Iterator[Pick[I, None]]:
        """The flows' first items in the order of the tags.

        A flow that is charged while it has its turn comes again; of the others nothing but their first items may
        change.
        """
        books = self.books.values()
        heap = [(flow.settled + flow.reserved * flow.inverse, flow.order, flow) for flow in books if flow.queue]
        heapify(heap)
        while heap:
            tag, order, flow = heap[0]
            if flow.queue:
                yield Pick(flow.queue[0][2], None, tag, None)
            if flow.tag > tag:
                heapreplace(heap, (flow.tag, order, flow))
            else:
                heappop(heap)

    def select(self, fits: Callable[[I], P | None]) -> Pick[I, P] | None:
        passed_over: I | None = None
        for item, _, floor, _ in self.in_order():
            place = fits(item)
            if place is not None:
                return Pick(item, place, floor, passed_over)
            if passed_over is None:
                passed_over = item
        return None

    def dispatch(self, pick: Pick[I, P], reserve: int) -> None:
        self._advance_clock(pick)
        flow = self._running[pick.item] = self._take(pick.item)
        flow.num_running += 1
        self._reserve(flow, pick.item, reserve)
        self._forget_passed()

    def settle(self, item: I, cost: int = 0) -> None:
        flow = self._running.pop(item)
        flow.num_running -= 1
        self._refund(flow, item)
        flow.settled += cost * flow.inverse
        self._rest(flow)

    def set_share(self, flow: F, share: Share) -> None:
        if flow in self.books:
            self._share(self.books[flow], share)

    def forgo(self, flow: F) -> None:
        found = self.books.get(flow)
        if found is not None:
            self._catch_up(flow)
            self._lift(found)

    # ---- the rules; the property tests break each of them to see that it is noticed

    def _catch_up(self, newcomer: F) -> None:
        others = [flow for flow in self.books.values() if flow.queue and flow.key != newcomer]
        if others:
            self.virtual_time = max(self.virtual_time, min(others, key=lambda flow: (flow.tag, flow.order)).settled)
            self._forget_passed()

    def _lift(self, flow: Flow[F, I]) -> None:
        flow.settled += max(0, self.virtual_time - flow.tag)

    def _advance_clock(self, pick: Pick[I, P]) -> None:
        self.virtual_time = max(self.virtual_time, pick.floor)

    def _reserve(self, flow: Flow[F, I], item: I, cost: int) -> None:
        flow.unspent[item] = cost
        flow.reserved += cost

    def _refund(self, flow: Flow[F, I], item: I) -> None:
        flow.reserved -= flow.unspent.pop(item, 0)

    def _share(self, flow: Flow[F, I], share: Share) -> None:
        assert not share.cap, "boosts are for the fast one"
        before, flow.inverse = flow.inverse, TAG_SCALE // share.weight
        flow.settled += flow.reserved * (before - flow.inverse)

    # ---- books

    def remember(self, flow: F, share: Share) -> Flow[F, I]:
        found = self.books.get(flow)
        if found is None:
            found = self.books[flow] = Flow(flow, self._num_flows_seen)
            self._num_flows_seen += 1
            found.settled = self.virtual_time
        self._idle.pop(flow, None)
        self._share(found, share)
        return found

    def _take(self, item: I) -> Flow[F, I]:
        flow, entry = self._queued.pop(item)
        del flow.queue[bisect_left(flow.queue, entry)]
        return flow

    def _rest(self, flow: Flow[F, I]) -> None:
        # A flow ahead of the clock is forgotten once that has passed it.
        if not self._queued and not self._running:
            self.virtual_time = max(self.virtual_time, *(known.tag for known in self.books.values()))
            self.books.clear()
            self._idle.clear()
        elif not flow.queue and not flow.num_running:
            self._idle[flow.key] = flow
            self._forget_passed()

    def _forget_passed(self) -> None:
        for flow in [flow for flow in self._idle.values() if flow.tag <= self.virtual_time]:
            del self._idle[flow.key], self.books[flow.key]

    def check_invariants(self) -> None:
        for key, flow in self.books.items():
            assert flow.queue == sorted(entry for found, entry in self._queued.values() if found is flow)
            assert flow.reserved == sum(flow.unspent.values())
            assert flow.unspent.keys() == {item for item, found in self._running.items() if found is flow}
            assert flow.num_running == len(flow.unspent)
            assert (key in self._idle) == (not flow.queue and not flow.num_running)
            assert key not in self._idle or flow.tag > self.virtual_time
        assert (
            sum(flow.num_queued + flow.num_running for flow in self.books.values())
            == self.num_queued + self.num_running
        )
