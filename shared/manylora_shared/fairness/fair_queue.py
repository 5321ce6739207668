"""The scheduler's fair queue, for tens of thousands of flows. Pure; one writer, its owner.

Follows the rules of seam.py, with two of its own (docs/decisions/0008):

1. select: argmin of vt_f - boost_f / phi_f; boost_f = min(cap_f, base_f + aging * phi_f * wait), cap_f once urgent.
2. count: a source's counter grew by c: min(c, R_f) moves from R_f to a_f, the rest is added to a_f.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from manylora_shared.fairness.contest import NEVER_US, ArrivalContest, Contender, Contest, Queued
from manylora_shared.fairness.seam import TAG_SCALE, Pick, Rank, Share

_COMPACT_SLACK = 64  # A heap is rebuilt once it has this many entries more than twice the live ones.

_MAX_SHARES = 4096  # so many different shares are known at a time

F = TypeVar("F", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P")


class FlowBooks(Contender[F, I]):
    """`queue` is a heap in which items that were removed may linger."""

    __slots__ = ("inverse", "num_queued", "num_running", "queue", "reserved", "settled", "share", "unspent")

    def __init__(self, key: F, order: int) -> None:
        super().__init__(key, order)
        self.share = Share(1)
        self.inverse = TAG_SCALE
        self.settled = 0
        self.reserved = 0
        # What is left of running items' reservations, in the order of dispatch: charges eat the oldest first.
        self.unspent: dict[I, int] = {}
        self.queue: list[Queued[I]] = []
        self.num_queued = 0
        self.num_running = 0

    @property
    def tag(self) -> int:
        return self.settled + self.reserved * self.inverse

    @property
    def idle(self) -> bool:
        return not self.num_queued and not self.num_running


class FairQueue(Generic[F, I]):
    """A `Fairness`. Times are whole microseconds of one clock.

    Items of equal `need` are offered to `select`'s test through one of them: a decision costs O(log flows + needs).
    `aging_per_s` is the cost per unit of weight by which a waiting flow's boost grows in a second.
    """

    _contest_type: ClassVar[type[Contest[Any, Any]]] = Contest

    def __init__(self, *, aging_per_s: int = 0) -> None:
        self._contest: Contest[F, I] = self._contest_type(aging_per_s)
        # What queue_succession.py takes over, for a successor and from a predecessor; for all others to read:
        self.virtual_time = 0
        self.books: dict[F, FlowBooks[F, I]] = {}
        self.counted: dict[str, dict[F, int]] = {}  # by source: cumulative, as they were settled last
        # Until `resume`: flows that were backlogged at the snapshot. Who comes back of these keeps its tag.
        self.returning: dict[F, None] | None = None
        self._items: dict[I, Any] = {}  # a queued item's entry in its flow's queue, a running one's flow
        self.num_queued = 0
        self.num_running = 0
        # Flows whose place in the contest is not up to date; whether more than their tag has changed.
        self._moved: dict[FlowBooks[F, I], bool] = {}
        # (tag, order, flow) of idle flows ahead of the clock; stale entries linger
        self._resting: list[tuple[int, int, F]] = []
        # Inverse, base, cap and fill_us, once for all flows of a share: numbers of each flow's own would be cold.
        self._follows: dict[Share, tuple[int, int, int, int]] = {}
        self._next_order = 0
        self._next_serial = 0

    # ---- reading

    @property
    def num_flows(self) -> int:
        return len(self.books)

    @property
    def is_restoring(self) -> bool:
        return self.returning is not None

    def tag_of(self, flow: F) -> int:
        found = self.books.get(flow)
        return found.tag if found is not None else self.virtual_time

    def has_come_as_far(self, flow: F, as_other: F) -> bool:
        found, other = self.books.get(flow), self.books.get(as_other)
        return found is not None and found.tag >= (self.virtual_time if other is None else other.settled)

    def weight_of(self, flow: F) -> int:
        # 1 for a flow that is not remembered
        found = self.books.get(flow)
        return found.share.weight if found is not None else 1

    def reserved_by(self, flow: F) -> int:
        found = self.books.get(flow)
        return found.reserved if found is not None else 0

    def queued_in(self, flow: F) -> int:
        found = self.books.get(flow)
        return found.num_queued if found is not None else 0

    def running_in(self, flow: F) -> int:
        found = self.books.get(flow)
        return found.num_running if found is not None else 0

    def flows(self) -> list[F]:
        return [flow.key for flow in self.books.values() if not flow.idle]

    # ---- items

    def push(
        self,
        item: I,
        flow: F,
        *,
        share: Share,
        rank: Rank,
        need: Hashable = None,
        since_us: int = 0,
        urgent_us: int | None = None,
    ) -> None:
        """Queues an item that waits since `since_us` and has its flow's full boost from `urgent_us` on."""
        assert item not in self._items, f"{item} is queued or runs"
        known = self.books.get(flow)
        is_newcomer = known is None or not known.num_queued
        if is_newcomer:
            self._catch_up(flow)
        entry = self.remember(flow, share)
        if is_newcomer and (self.returning is None or flow not in self.returning):
            self._lift(entry)
        urgency, due_us, order = rank
        if urgent_us is None:
            urgent_us = NEVER_US
        if need is None:
            need = item
        serial = self._next_serial
        # As Queued(...), which would be a call of a Python function.
        queued = tuple.__new__(Queued, (urgency, due_us, order, serial, item, need, since_us, urgent_us, entry))
        self._next_serial = serial + 1
        self._items[item] = queued
        self.num_queued += 1
        heapq.heappush(entry.queue, queued)
        entry.num_queued += 1
        if entry.queue[0] is queued:
            self._moved[entry] = True

    def remove(self, item: I) -> None:
        flow = self._take(item)
        del self._items[item]
        self._move(flow)
        self.rest(flow)

    def select(self, fits: Callable[[I], P | None], now_us: int = 0) -> Pick[I, P] | None:
        self._show_moved()
        return self._contest.select(fits, now_us)

    def select_one_by_one(self, fits: Callable[[F, I], P | None], now_us: int, *, limit: int) -> Pick[I, P] | None:
        """As `select`, but asks for the first `limit` flows one after the other."""
        self._show_moved()
        return self._contest.select_one_by_one(fits, now_us, limit=limit)

    def dispatch(self, pick: Pick[I, P], reserve: int) -> None:
        assert reserve >= 0
        assert self.returning is None, "a rebuilt clock is resumed first"
        item, _, _, _ = pick
        self._advance_clock(pick)
        flow = self._take(item)
        self._run(item, flow)
        self._reserve(flow, item, reserve)
        flow.served_us = self._contest.now_us
        self._moved[flow] = True
        if self._resting and self._resting[0][0] <= self.virtual_time:
            self._forget_passed()

    def adopt(self, item: I, flow: F, *, share: Share, reserve: int) -> None:
        """A predecessor dispatched the item; `reserve` is left of what it had reserved."""
        assert item not in self._items, f"{item} is queued or runs"
        entry = self.remember(flow, share)
        self._run(item, entry)
        self._reserve(entry, item, reserve)
        self._move(entry)

    def settle(self, item: I, cost: int = 0) -> None:
        """`cost` is what the item used and no counter names."""
        assert cost >= 0
        flow: FlowBooks[F, I] = self._items.pop(item)
        assert isinstance(flow, FlowBooks), f"{item} was not dispatched"
        self.num_running -= 1
        self._refund(flow, item)
        if cost:
            flow.settled += cost * flow.inverse
        flow.num_running -= 1
        if flow.num_queued:
            self._moved.setdefault(flow, False)
        else:
            self.rest(flow)

    def set_share(self, flow: F, share: Share) -> None:
        found = self.books.get(flow)
        if found is not None and found.share != share:
            self._share(found, share)

    def forgo(self, flow: F) -> None:
        found = self.books.get(flow)
        if found is not None:
            self._catch_up(flow)
            self._lift(found)
            self._move(found)

    def set_apart(self, flow: F, *, is_apart: bool) -> None:
        """Whether the flow's items are offered to `select`'s test by themselves."""
        found = self.books.get(flow)
        if found is not None and found.is_apart != is_apart:
            found.is_apart = is_apart
            self._move(found)

    # ---- counters

    def count(
        self, source: str, totals: Mapping[F, int], share_of: Callable[[F], Share], *, are_all: bool = False
    ) -> list[tuple[F, int]]:
        """Settles what a source's cumulative counters grew by; returns (flow, cost) for each that grew.

        A counter that fell back, or is missing if `are_all`, is a new process's: then all of the source's begin at
        zero.
        """
        counted = self.counted.get(source)
        if counted is None:
            counted = self.counted[source] = {}
        elif are_all and any(before > totals.get(flow, 0) for flow, before in counted.items()):
            counted.clear()
        grown: list[tuple[F, int]] = []
        for flow, total in totals.items():
            cost = total - counted.get(flow, 0)
            if cost > 0:
                counted[flow] = total
                grown.append((flow, cost))
            elif cost:
                counted.clear()
                grown = [(flow, total) for flow, total in totals.items() if total]
                counted.update(grown)
                break
        for flow, cost in grown:
            self._charge(self.remember(flow, share_of(flow)), cost)
        return grown

    def begin_counting(self, source: str, totals: Mapping[F, int]) -> None:
        # These totals are not charged.
        self.counted[source] = dict(totals)

    def counted_by(self, source: str) -> Mapping[F, int]:
        """The result is for reading, until the next call."""
        return self.counted.get(source, {})

    def knows_source(self, source: str) -> bool:
        return source in self.counted

    def forget_source(self, source: str) -> None:
        self.counted.pop(source, None)

    # ---- the rules; the property tests break each of them to see that it is noticed

    def _catch_up(self, newcomer: F) -> None:
        # A newcomer has no claim to the time in which the least of the others did what it had not reserved.
        if self.returning is not None:
            return
        self._show_moved()
        for place in self._contest.plain.first_places(2):
            other: FlowBooks[F, I] = place.flow  # type: ignore[assignment]
            if other.key != newcomer:
                if other.settled > self.virtual_time:
                    self.virtual_time = other.settled
                    self._forget_passed()
                break

    def _lift(self, flow: FlowBooks[F, I]) -> None:
        flow.settled += max(0, self.virtual_time - flow.tag)

    def _advance_clock(self, pick: Pick[I, P]) -> None:
        if pick.floor > self.virtual_time:
            self.virtual_time = pick.floor

    def _reserve(self, flow: FlowBooks[F, I], item: I, cost: int) -> None:
        if cost:
            flow.unspent[item] = cost
            flow.reserved += cost

    def _refund(self, flow: FlowBooks[F, I], item: I) -> None:
        flow.reserved -= flow.unspent.pop(item, 0)

    def _cap(self, flow: FlowBooks[F, I]) -> int:
        # in tag units
        return flow.share.cap * flow.inverse

    def _charge(self, flow: FlowBooks[F, I], cost: int) -> None:
        flow.settled += cost * flow.inverse
        unspent = flow.unspent
        while cost and unspent:
            item, left = next(iter(unspent.items()))
            if cost < left:
                unspent[item] = left - cost
                flow.reserved -= cost
                break
            del unspent[item]
            flow.reserved -= left
            cost -= left
        if flow.num_queued:
            self._moved.setdefault(flow, False)
        else:
            self.rest(flow)

    # ---- books

    def remember(self, flow: F, share: Share) -> FlowBooks[F, I]:
        entry = self.books.get(flow)
        if entry is None:
            entry = self.books[flow] = FlowBooks(flow, self._next_order)
            self._next_order += 1
            self._share(entry, share)
            self._lift(entry)
        elif entry.share is not share and entry.share != share:
            self._share(entry, share)
        return entry

    def _share(self, flow: FlowBooks[F, I], share: Share) -> None:
        flow.share = share
        inverse_before = flow.inverse
        follows = self._follows.get(share)
        if follows is None:
            assert share.weight >= 1
            assert 0 <= share.base <= share.cap
            flow.inverse = TAG_SCALE // share.weight
            base, cap = share.base * flow.inverse, self._cap(flow)
            if len(self._follows) >= _MAX_SHARES:
                self._follows.clear()
            follows = self._follows[share] = flow.inverse, base, cap, self._contest.fill_us(base, cap)
        flow.inverse, flow.base, flow.cap, flow.fill_us = follows
        flow.settled += flow.reserved * (inverse_before - flow.inverse)
        self._move(flow)

    def _take(self, item: I) -> FlowBooks[F, I]:
        queued: Queued[I] = self._items[item]
        flow: FlowBooks[F, I] = queued.flow
        self.num_queued -= 1
        flow.num_queued -= 1
        if flow.queue[0] is queued:
            heapq.heappop(flow.queue)
        elif len(flow.queue) > 2 * flow.num_queued + _COMPACT_SLACK:
            flow.queue = [entry for entry in flow.queue if self._items.get(entry.item) is entry]
            heapq.heapify(flow.queue)
        return flow

    def _run(self, item: I, flow: FlowBooks[F, I]) -> None:
        self._items[item] = flow
        flow.num_running += 1
        self.num_running += 1

    def _move(self, flow: FlowBooks[F, I]) -> None:
        self._moved[flow] = True

    def _show_moved(self) -> None:
        contest = self._contest
        for flow, is_more in self._moved.items():
            if not is_more:
                contest.retag(flow, flow.settled + flow.reserved * flow.inverse)
            elif flow.num_queued:
                queue = flow.queue
                while len(queue) > flow.num_queued and self._items.get(queue[0].item) is not queue[0]:
                    heapq.heappop(queue)
                flow.head = queue[0]
                contest.put(flow, flow.settled + flow.reserved * flow.inverse)
            else:
                flow.queue.clear()
                if flow.head is not None:
                    contest.drop(flow)
        self._moved.clear()

    def rest(self, flow: FlowBooks[F, I]) -> None:
        # A flow ahead of the clock is forgotten once that has passed it.
        if flow.num_running or flow.num_queued or self.returning is not None:
            return
        if not self._items:
            self.virtual_time = max(self.virtual_time, max(f.tag for f in self.books.values()))
            for known in list(self.books.values()):
                self._forget(known)
            self._resting.clear()
        elif flow.tag <= self.virtual_time:
            self._forget(flow)
        else:
            heapq.heappush(self._resting, (flow.tag, flow.order, flow.key))
            if len(self._resting) > 2 * len(self.books) + _COMPACT_SLACK:
                self._resting = [(f.tag, f.order, f.key) for f in self.books.values() if f.idle]
                heapq.heapify(self._resting)

    def _forget_passed(self) -> None:
        while self._resting and self._resting[0][0] <= self.virtual_time:
            tag, order, key = heapq.heappop(self._resting)
            flow = self.books.get(key)
            if flow is not None and flow.idle and flow.order == order and flow.tag == tag:
                self._forget(flow)

    def _forget(self, flow: FlowBooks[F, I]) -> None:
        # What refers to the flow from its own parts is cut: then its memory needs no garbage collection.
        del self.books[flow.key]
        self._moved.pop(flow, None)
        flow.queue.clear()
        self._contest.forget(flow)

    def check_invariants(self) -> None:
        self._show_moved()
        self._contest.check_invariants()
        queued: dict[F, int] = {}
        running: dict[F, int] = {}
        for found in self._items.values():
            if isinstance(found, Queued):
                queued[found.flow.key] = queued.get(found.flow.key, 0) + 1
            else:
                running[found.key] = running.get(found.key, 0) + 1
        assert (self.num_queued, self.num_running) == (sum(queued.values()), sum(running.values()))
        assert self._contest.plain.size == sum(flow.num_queued > 0 for flow in self.books.values())
        for flow in self.books.values():
            assert flow.num_queued == queued.get(flow.key, 0)
            assert flow.num_running == running.get(flow.key, 0)
            assert flow.reserved == sum(flow.unspent.values())
            assert all(left > 0 and self._items[item] is flow for item, left in flow.unspent.items())
            assert flow.num_running or not flow.reserved
            assert not flow.idle or flow.tag > self.virtual_time or self.returning is not None
            if flow.num_queued:
                first = min(entry for entry in flow.queue if self._items.get(entry.item) is entry)
                assert flow.head is first
                assert flow.plain.key == flow.tag
            else:
                assert flow.head is None


class ArrivalQueue(FairQueue[F, I]):
    """First come, first served, with the fair queue's books. Ranks' `order` must grow over all flows."""

    _contest_type = ArrivalContest

    def push(
        self,
        item: I,
        flow: F,
        *,
        share: Share,
        rank: Rank,
        need: Hashable = None,
        since_us: int = 0,
        urgent_us: int | None = None,
    ) -> None:
        rank = Rank(0, 0, rank.order)
        super().push(item, flow, share=share, need=need, rank=rank, since_us=since_us, urgent_us=urgent_us)
