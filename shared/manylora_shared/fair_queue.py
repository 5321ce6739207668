"""The fair-scheduling policy: who is next, by one virtual clock. Pure; one writer, its owner.

Start-time fair queuing (Goyal, Vin, Cheng 1996; with several servers SFQ(D), Jin, Chase, Kaur 2004), with costs that
are only estimated when an item starts and settled while it runs. Owns, of every flow f with queued or running items,
its weight phi_f, its settled tag a_f (charges per weight, plus lifts), the cost R_f that its running items have
reserved and not used yet, and its queue; and the clock V. The tag by which flows are compared is always

    vt_f = a_f + R_f / phi_f                      exact integers: a cost c counts c * (TAG_SCALE // phi_f)

    push      on a flow without queued items:     vt_f = max(vt_f, V), so that idling saves nothing up
    select    argmin of vt_f over the flows whose first item can be started now; ties: the flow that came first
    dispatch  V = max(V, vt_f), then R_f += reserve
    charge    work that was really done: used = min(cost, R_f) moves from R_f to a_f, the rest is added to a_f
    close     what is left of the item's reservation leaves R_f: the refund
    idle      a flow without items and with vt_f <= V is forgotten; when no item is left at all, V passes every tag

The bound that this form has. Call f *startable* while its first item is accepted by `select`. Let c_f be f's largest
reservation, R_f its largest reserved sum, and U_f the most that its running items were still to be charged beyond R_f
(0 where reservations are never too small and each charge eats its own item's reservation). For any interval in which f
and g are startable throughout, and W is what was charged in it,

    | W_f / phi_f - W_g / phi_g |  <=  (R_f + c_f + U_f) / phi_f  +  (R_g + c_g + U_g) / phi_g

Proof: a_f(t) <= vt_f(tau-) + (c_f + U_f) / phi_f with tau f's last dispatch before t; there vt_f(tau-) <= vt_g(tau) if
g was startable, else g was lifted to V >= vt_f(tau-) later; and vt_g(tau) <= a_g(t) + R_g / phi_g. Exchange f and g,
and subtract the values at both ends. A request is one unit here, so R grows with the number of slots, U with the error
of the estimate: quanta take both out. A flow that could not be started keeps its tag, and so a lead of at most what it
was denied, which the bound does not cover; it is worked off before the clock moves on.

Charges name a flow and not an item (workers count by flow), so they eat the reservations of the flow oldest first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

TAG_SCALE = 1 << 40
"""Virtual time of one unit of cost at weight 1. Weights are far smaller, so TAG_SCALE // weight is as good as exact."""
_COMPACT_SLACK = 64
"""A heap is rebuilt once it has this many entries more than twice the live ones."""

F = TypeVar("F", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741


class _Item(Generic[F]):
    """A queued item, or (with `sort_key` None) a running one."""

    __slots__ = ("flow", "need", "sort_key")

    def __init__(self, flow: F, need: Hashable, sort_key: tuple[int, int]) -> None:
        self.flow = flow
        self.need = need
        self.sort_key: tuple[int, int] | None = sort_key


class _Flow(Generic[F, I]):
    """One flow's books. `queue` is a heap of (sort_key, item) in which entries of removed items may linger."""

    __slots__ = ("entry", "inverse", "key", "num_queued", "num_running", "order", "queue", "reserved", "settled",
                 "unspent", "weight")  # fmt: skip

    def __init__(self, key: F, order: int, weight: int) -> None:
        self.key = key
        self.order = order
        self.weight = weight
        self.inverse = TAG_SCALE // weight
        self.settled = 0
        self.reserved = 0
        self.unspent: OrderedDict[I, int] = OrderedDict()
        """Running items that have some of their reservation left, in the order of their dispatch."""
        self.queue: list[tuple[tuple[int, int], I]] = []
        self.num_queued = 0
        self.num_running = 0
        self.entry: tuple[int, int, Hashable] | None = None
        """(tag, order, need) by which the flow stands in the contest; None: it does not."""

    @property
    def tag(self) -> int:
        return self.settled + self.reserved * self.inverse

    @property
    def idle(self) -> bool:
        return not self.num_queued and not self.num_running


class FairQueue(Generic[F, I]):
    """Queued items in flows, and the choice among them. Not thread-safe.

    An item is queued (push), then either removed, or dispatched and closed. `need` is what it takes to start an item:
    items of equal need are offered to `select`'s test through one of them only, so that a decision costs O(log n) in
    the number of flows plus the number of distinct needs.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._flows: dict[F, _Flow[F, I]] = {}
        self._items: dict[I, _Item[F]] = {}
        self._groups: dict[Hashable, list[tuple[int, int, F]]] = {}
        """By need, a heap of (tag, order, flow) of the flows whose first item has it; stale entries linger."""
        self._group_sizes: dict[Hashable, int] = {}
        self._resting: list[tuple[int, int, F]] = []
        """Idle flows ahead of the clock, by tag; stale entries linger."""
        self._next_order = 0
        self._num_queued = 0
        self._num_running = 0

    # ---- reading

    @property
    def virtual_time(self) -> int:
        """The clock V. Never falls."""
        return self._clock

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_flows(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    def tag_of(self, flow: F) -> int:
        """The flow's tag; a flow that is not remembered would start at the clock."""
        found = self._flows.get(flow)
        return found.tag if found is not None else self._clock

    def reserved_by(self, flow: F) -> int:
        """Cost that the flow's running items reserved and have not used."""
        found = self._flows.get(flow)
        return found.reserved if found is not None else 0

    def queued_in(self, flow: F) -> int:
        found = self._flows.get(flow)
        return found.num_queued if found is not None else 0

    def running_in(self, flow: F) -> int:
        found = self._flows.get(flow)
        return found.num_running if found is not None else 0

    def flows(self) -> list[F]:
        """Flows with queued or running items, in the order in which they came."""
        return [flow.key for flow in self._flows.values() if not flow.idle]

    # ---- changes

    def set_weight(self, flow: F, weight: int) -> None:
        """A new weight for a remembered flow: what was settled keeps its tag, what is reserved counts anew."""
        assert weight >= 1
        found = self._flows.get(flow)
        if found is not None and found.weight != weight:
            found.weight = weight
            found.inverse = TAG_SCALE // weight
            self._index(found)

    def push(self, item: I, flow: F, *, weight: int, need: Hashable, order: int, priority: int = 0) -> None:
        """Queues an item. Inside its flow the higher priority is first, then the lower `order`."""
        assert item not in self._items, f"{item} is known"
        entry = self._remember(flow, weight)
        if not entry.num_queued:
            self._lift(entry)
        sort_key = (-priority, order)
        self._items[item] = _Item(flow, need, sort_key)
        heapq.heappush(entry.queue, (sort_key, item))
        entry.num_queued += 1
        self._num_queued += 1
        self._index(entry)

    def remove(self, item: I) -> None:
        """Forgets a queued item."""
        entry = self._take(item)
        del self._items[item]
        self._index(entry)
        self._rest(entry)

    def select(self, fits: Callable[[I], bool]) -> I | None:
        """The item to start next: the first of the flow with the least tag whose first item `fits`. Changes nothing."""
        best: tuple[int, int, F] | None = None
        best_item: I | None = None
        for need in self._groups:
            head = self._head_of(need)
            if best is not None and head[:2] >= best[:2]:
                continue
            item = self._first(self._flows[head[2]])
            if fits(item):
                best, best_item = head, item
        return best_item

    def front(self) -> I | None:
        """The first item of the flow with the least tag, whether it can be started or not."""
        return self.select(lambda _: True)

    def dispatch(self, item: I, reserve: int) -> None:
        """Starts a queued item that `select` returned, and reserves its estimated cost."""
        assert reserve >= 0
        entry = self._flows[self._items[item].flow]
        self._advance_clock(entry.tag)
        self._take(item)
        entry.num_running += 1
        self._num_running += 1
        self._reserve(entry, item, reserve)
        self._index(entry)
        self._forget_passed()

    def charge(self, flow: F, cost: int, *, weight: int) -> None:
        """Counts work that was done for a flow, whether it has items here or not."""
        assert cost >= 0
        if not cost:
            return
        entry = self._remember(flow, weight)
        entry.settled += cost * entry.inverse
        self._spend(entry, cost)
        self._index(entry)
        self._rest(entry)

    def close(self, item: I) -> None:
        """A running item has ended, however it did; what is left of its reservation is given back."""
        running = self._items.pop(item)
        assert running.sort_key is None, f"{item} was not dispatched"
        entry = self._flows[running.flow]
        self._refund(entry, item)
        entry.num_running -= 1
        self._num_running -= 1
        self._index(entry)
        self._rest(entry)

    # ---- the four rules; the property tests break each of them to see that it is noticed

    def _lift(self, flow: _Flow[F, I]) -> None:
        flow.settled += max(0, self._clock - flow.tag)

    def _advance_clock(self, tag: int) -> None:
        self._clock = max(self._clock, tag)

    def _reserve(self, flow: _Flow[F, I], item: I, cost: int) -> None:
        if cost:
            flow.unspent[item] = cost
            flow.reserved += cost

    def _refund(self, flow: _Flow[F, I], item: I) -> None:
        flow.reserved -= flow.unspent.pop(item, 0)

    # ---- books

    def _spend(self, flow: _Flow[F, I], cost: int) -> None:
        """Lets a charge eat the flow's reservations, oldest first."""
        while cost and flow.unspent:
            item, left = flow.unspent.popitem(last=False)
            used = min(cost, left)
            cost -= used
            flow.reserved -= used
            if left > used:
                flow.unspent[item] = left - used
                flow.unspent.move_to_end(item, last=False)

    def _remember(self, flow: F, weight: int) -> _Flow[F, I]:
        assert weight >= 1
        entry = self._flows.get(flow)
        if entry is None:
            entry = self._flows[flow] = _Flow(flow, self._next_order, weight)
            self._next_order += 1
            self._lift(entry)
        elif entry.weight != weight:
            self.set_weight(flow, weight)
        return entry

    def _take(self, item: I) -> _Flow[F, I]:
        """Takes a queued item out of its flow's queue."""
        queued = self._items[item]
        assert queued.sort_key is not None, f"{item} is not queued"
        queued.sort_key = None
        entry = self._flows[queued.flow]
        entry.num_queued -= 1
        self._num_queued -= 1
        if len(entry.queue) > 2 * entry.num_queued + _COMPACT_SLACK:
            entry.queue = [e for e in entry.queue if self._is_queued(e)]
            heapq.heapify(entry.queue)
        return entry

    def _is_queued(self, entry: tuple[tuple[int, int], I]) -> bool:
        item = self._items.get(entry[1])
        return item is not None and item.sort_key == entry[0]

    def _first(self, flow: _Flow[F, I]) -> I:
        while not self._is_queued(flow.queue[0]):
            heapq.heappop(flow.queue)
        return flow.queue[0][1]

    def _index(self, flow: _Flow[F, I]) -> None:
        """Brings the flow's place in the contest up to date."""
        entry = (flow.tag, flow.order, self._items[self._first(flow)].need) if flow.num_queued else None
        if entry == flow.entry:
            return
        before, flow.entry = flow.entry, entry
        if entry is not None:
            tag, order, need = entry
            group = self._groups.setdefault(need, [])
            self._group_sizes[need] = self._group_sizes.get(need, 0) + 1
            heapq.heappush(group, (tag, order, flow.key))
            if len(group) > 2 * self._group_sizes[need] + _COMPACT_SLACK:
                group[:] = [e for e in group if self._stands(e, need)]
                heapq.heapify(group)
        if before is not None:
            need = before[2]
            self._group_sizes[need] -= 1
            if not self._group_sizes[need]:
                del self._group_sizes[need], self._groups[need]

    def _stands(self, entry: tuple[int, int, F], need: Hashable) -> bool:
        flow = self._flows.get(entry[2])
        return flow is not None and flow.entry == (entry[0], entry[1], need)

    def _head_of(self, need: Hashable) -> tuple[int, int, F]:
        group = self._groups[need]
        while not self._stands(group[0], need):
            heapq.heappop(group)
        return group[0]

    def _rest(self, flow: _Flow[F, I]) -> None:
        """Forgets a flow that has become idle, or remembers to once the clock has passed it."""
        if not flow.idle:
            return
        if not self._num_queued and not self._num_running:
            self._clock = max(self._clock, max(f.tag for f in self._flows.values()))
            self._flows.clear()
            self._resting.clear()
        elif flow.tag <= self._clock:
            del self._flows[flow.key]
        else:
            heapq.heappush(self._resting, (flow.tag, flow.order, flow.key))
            if len(self._resting) > 2 * len(self._flows) + _COMPACT_SLACK:
                self._resting = [(f.tag, f.order, f.key) for f in self._flows.values() if f.idle]
                heapq.heapify(self._resting)

    def _forget_passed(self) -> None:
        while self._resting and self._resting[0][0] <= self._clock:
            tag, order, key = heapq.heappop(self._resting)
            flow = self._flows.get(key)
            if flow is not None and flow.idle and flow.order == order and flow.tag == tag:
                del self._flows[key]

    def check_invariants(self) -> None:
        """Every derived number against what it is derived from; for tests and for idle moments."""
        queued: dict[F, int] = {}
        running: dict[F, int] = {}
        for item in self._items.values():
            counts = running if item.sort_key is None else queued
            counts[item.flow] = counts.get(item.flow, 0) + 1
        assert sum(queued.values()) == self._num_queued
        assert sum(running.values()) == self._num_running
        assert sum(self._group_sizes.values()) == sum(1 for f in self._flows.values() if f.num_queued)
        for flow in self._flows.values():
            assert flow.num_queued == queued.get(flow.key, 0)
            assert flow.num_running == running.get(flow.key, 0)
            assert flow.reserved == sum(flow.unspent.values())
            assert all(left > 0 and self._items[item].flow == flow.key for item, left in flow.unspent.items())
            assert flow.num_running or not flow.reserved
            assert not flow.idle or flow.tag > self._clock
            if flow.num_queued:
                need = self._items[self._first(flow)].need
                assert flow.entry == (flow.tag, flow.order, need)
                assert (flow.tag, flow.order, flow.key) in self._groups[need]
            else:
                assert flow.entry is None
