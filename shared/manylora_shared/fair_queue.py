"""TWFQ-Q, the fair-scheduling policy: who is next, by one virtual clock. Pure; one writer, its owner.

Start-time fair queuing (Goyal, Vin, Cheng 1996; with several servers SFQ(D), Jin, Chase, Kaur 2004) over token costs,
generalised to costs that are known only afterwards, refunds, and capped boosts. The scheduler dispatches requests by
it; a worker can choose whose quantum or prefill chunk is next by it (docs/decisions/0008). Whatever is dispatched is an
*item* here.

Owns, of every flow f with items, its weight phi_f, its settled tag a_f (charges per weight, plus lifts), the cost R_f
that its running items have reserved and not used yet, and its queue; the clock V; and what each source has counted.
The tag by which flows are compared is

    vt_f = a_f + R_f / phi_f                      exact integers: a cost c counts c * (TAG_SCALE // phi_f)

    push      on a flow without queued items:     vt_f = max(vt_f, V), so that idling saves nothing up
    select    argmin of vt_f - boost_f / phi_f over the flows whose first item can be started now
    dispatch  V = max(V, min of vt_f over those same flows), un-boosted and before the charge; then R_f += reserve
    count     a source's cumulative counter grew by c: min(c, R_f) moves from R_f to a_f, the rest is added to a_f
    settle    an item ended: what is left of its reservation leaves R_f, once; a cost that no counter names joins a_f
    idle      a flow without items and with vt_f <= V is forgotten; when no item is left at all, V passes every tag

    boost_f = min(cap_f, base_f + aging * phi_f * wait)      and cap_f from the moment the first item is urgent

Aging is in proportion to the weight, so all tags that still rise do so at one pace, and their order stands still.

The bound. Call f *startable* while its first item is accepted by `select`'s test. Let c_f be f's largest reservation,
R_f its largest reserved sum, beta_f its cap, and U_f the most that its running items could come to cost beyond R_f
(0 where a reservation is the most that its item can cost). In any interval in which f and g are startable throughout,
with W the work really done in it (counted already or not) and L_f = max(0, V - vt_f) at its beginning,

    | W_f / phi_f - W_g / phi_g |  <=  (R_f + c_f + beta_f + U_f) / phi_f + L_f  +  the same of g

Proof. a_f(t) <= vt_f(tau-) + (c_f + U_f) / phi_f with tau f's last dispatch before t. If g was startable at tau, then
vt_f(tau-) <= vt_g(tau) + beta_f / phi_f by the choice; and if it was not, vt_f(tau-) <= V + beta_f / phi_f, and g came
back at vt_g >= V - L_g. In the other direction vt_g <= a_g + R_g / phi_g. Exchange f and g, and subtract the values at
both ends of the interval. L counts only for a flow that was denied since it became backlogged: one that was passed over
because its first item fitted nowhere keeps the credit of what it was denied. For all others it is 0.

With several choosers that hear late of each other, or a clock rebuilt from a snapshot, E_f / phi_f + E_V joins: the
errors of the tags and of the clock that were used.

Counters name a flow and not an item, so what they count eats the flow's reservations oldest first. A source is one
worker's counting: cumulative, so that a report that comes twice, or late, or not at all changes nothing in the end.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from manylora_shared.flow_order import FlowOrder, Place

TAG_SCALE = 1 << 40
"""Virtual time of one unit of cost at weight 1. Weights are far smaller, so TAG_SCALE // weight is as good as exact."""
_US_PER_S = 1_000_000
_COMPACT_SLACK = 64
"""A heap is rebuilt once it has this many entries more than twice the live ones."""

F = TypeVar("F", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P")


class Share(NamedTuple):
    """What a flow is entitled to.

    Boosts are in units of cost. `cap` is the most by which a flow is ever preferred beyond its tag, and exactly what
    its boosts add to the bound; `base` is there from the beginning.
    """

    weight: int
    base: int = 0
    cap: int = 0


class Rank(NamedTuple):
    """An item's place inside its flow: lowest first."""

    urgency: int
    """The negated priority that its owner gave it."""
    due_us: int
    order: int
    """Unique inside the flow."""


class Pick(NamedTuple, Generic[I, P]):
    """What `select` chose; `dispatch` takes it."""

    item: I
    place: P
    """What the test returned for it."""
    floor: int
    """The least un-boosted tag of a flow that could have been started."""
    passed_over: I | None
    """The item that would have been chosen if it could be started."""


class FlowSnapshot(NamedTuple, Generic[F]):
    flow: F
    weight: int
    settled: int
    queued: bool


@dataclass(frozen=True)
class Snapshot(Generic[F, I]):
    """All that a successor cannot hear from the sources. Together with their counters it gives the tags again."""

    clock: int
    flows: tuple[FlowSnapshot[F], ...]
    reserved: tuple[tuple[I, F, int], ...]
    """What is left of each running item's reservation, in the order of dispatch."""
    counted: Mapping[str, Mapping[F, int]]
    """By source: the counters up to which `settled` goes."""

    @property
    def size(self) -> int:
        """Entries in all."""
        return len(self.flows) + len(self.reserved) + sum(map(len, self.counted.values()))


class _Item(Generic[F]):
    """A queued item, or (with `rank` None) a running one."""

    __slots__ = ("flow", "need", "rank", "since_us", "urgent_us")

    def __init__(self, flow: F, need: Hashable, rank: Rank | None, since_us: int, urgent_us: int | None) -> None:
        self.flow = flow
        self.need = need
        self.rank = rank
        self.since_us = since_us
        self.urgent_us = urgent_us


class _Flow(Generic[F, I]):
    """One flow's books. `queue` is a heap of (rank, item) in which entries of removed items may linger."""

    __slots__ = ("full_us", "head", "inverse", "is_apart", "key", "num_queued", "num_running", "order", "order_of",
                 "queue", "reserved", "settled", "share", "shown", "unspent")  # fmt: skip

    def __init__(self, key: F, order: int, share: Share) -> None:
        assert share.weight >= 1
        assert 0 <= share.base <= share.cap
        self.key = key
        self.order = order
        self.share = share
        self.inverse = TAG_SCALE // share.weight
        self.settled = 0
        self.reserved = 0
        self.unspent: OrderedDict[I, int] = OrderedDict()
        """Running items that have some of their reservation left, in the order of their dispatch."""
        self.queue: list[tuple[Rank, I]] = []
        self.num_queued = 0
        self.num_running = 0
        self.head: I | None = None
        """The first queued item, as it stands in the contest; None: the flow does not."""
        self.shown = 0
        """The tag by which it stands there."""
        self.order_of: FlowOrder[F] | None = None
        """The order of boosted tags in which it stands."""
        self.full_us: int | None = None
        """When its boost reaches its cap, while that is to come."""
        self.is_apart = False

    @property
    def tag(self) -> int:
        return self.settled + self.reserved * self.inverse

    @property
    def idle(self) -> bool:
        return not self.num_queued and not self.num_running


class FairQueue(Generic[F, I]):
    """Queued items in flows, and the choice among them. Not thread-safe. Times are whole microseconds of one clock.

    An item is queued (push), then either removed, or dispatched and settled. `need` is what it takes to start an item:
    items of equal need are offered to `select`'s test through one of them only, so that a decision costs O(log n) in
    the number of flows plus, where the first in order does not fit, the number of distinct needs.

    Args:
        aging_per_s: units of cost per unit of weight by which a waiting flow's boost grows in a second, up to its cap.
    """

    def __init__(self, *, aging_per_s: int = 0) -> None:
        self._aging = aging_per_s * TAG_SCALE // _US_PER_S
        """In tag units per microsecond."""
        self._clock = 0
        self._now_us = 0
        self._flows: dict[F, _Flow[F, I]] = {}
        self._items: dict[I, _Item[F]] = {}
        self._plain: FlowOrder[F] = FlowOrder()
        """Flows with queued items by their tag."""
        self._rising: FlowOrder[F] = FlowOrder()
        """Those whose boost still grows, by what their boosted tag would have been at time 0."""
        self._full: FlowOrder[F] = FlowOrder()
        """Those whose boost is at its cap, by their boosted tag."""
        self._filling: list[tuple[int, int, F]] = []
        """(when, order, flow) of the rising flows; stale entries linger."""
        self._resting: list[Place[F]] = []
        """Idle flows ahead of the clock, by tag; stale entries linger."""
        self._counted: dict[str, dict[F, int]] = {}
        self._returning: dict[F, None] | None = None
        """While a rebuilt clock waits for `resume`: the flows that were backlogged when the snapshot was taken."""
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

    def is_ahead(self, flow: F, of: F, cost: int) -> bool:
        """Whether a flow's tag is past another's by more than so much of its own cost."""
        found = self._flows.get(flow)
        return found is not None and found.tag - self.tag_of(of) > cost * found.inverse

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

    # ---- items

    def push(
        self,
        item: I,
        flow: F,
        *,
        share: Share,
        need: Hashable,
        rank: Rank,
        since_us: int = 0,
        urgent_us: int | None = None,
    ) -> None:
        """Queues an item that waits since `since_us` and has its flow's full boost from `urgent_us` on."""
        assert item not in self._items, f"{item} is known"
        entry = self._remember(flow, share)
        if not entry.num_queued and (self._returning is None or flow not in self._returning):
            self._lift(entry)
        self._items[item] = _Item(flow, need, rank, since_us, urgent_us)
        heapq.heappush(entry.queue, (rank, item))
        entry.num_queued += 1
        self._num_queued += 1
        self._index(entry)

    def remove(self, item: I) -> None:
        """Forgets a queued item."""
        entry = self._take(item)
        del self._items[item]
        self._index(entry)
        self._rest(entry)

    def select(self, fits: Callable[[I], P | None], now_us: int) -> Pick[I, P] | None:
        """The item to start next: the first of the flow with the least boosted tag whose first item `fits`.

        `fits` returns where the item would start, or None. Changes nothing but the time.
        """
        self._fill_boosts(now_us)
        first = self._first_boosted()
        if first is None:
            return None
        # Nearly always the first flow can be started, and so can the one with the least tag.
        flow, need = first
        item = self._head_of(flow)
        place = fits(item)
        if place is not None:
            return Pick(item, place, self._floor(fits, {need: True}), None)
        return self._select_behind(item, need, fits)

    def _select_behind(self, passed_over: I, need: Hashable, fits: Callable[[I], P | None]) -> Pick[I, P] | None:
        """The choice where the first in order does not fit: the first flows of all other needs, in order."""
        fitting = {need: False}
        aged = self._aging * self._now_us
        in_order = heapq.merge(
            ((key - aged, order, flow, need) for (key, order, flow), need in self._rising.heads()),
            ((key, order, flow, need) for (key, order, flow), need in self._full.heads()),
        )
        for _, _, flow, other in in_order:
            if other not in fitting:
                item = self._head_of(flow)
                place = fits(item)
                fitting[other] = place is not None
                if place is not None:
                    return Pick(item, place, self._floor(fits, fitting), passed_over)
        return None

    def select_one_by_one(self, fits: Callable[[F, I], P | None], now_us: int, *, limit: int) -> Pick[I, P] | None:
        """As `select`, for a test that depends on the flow: asks for the first items of the first `limit` flows, one
        after the other. The clock passes nobody by it: its floor is the least tag of all that are queued."""
        self._fill_boosts(now_us)
        aged = self._aging * self._now_us
        in_order = heapq.merge(
            ((key - aged, order, flow) for key, order, flow in self._rising.first_flows(limit)),
            self._full.first_flows(limit),
        )
        for _, _, flow in itertools.islice(in_order, limit):
            item = self._head_of(flow)
            place = fits(flow, item)
            if place is not None:
                first = self._plain.first()
                assert first is not None
                return Pick(item, place, first[0][0], None)
        return None

    def dispatch(self, pick: Pick[I, P], reserve: int) -> None:
        """Starts what `select` chose just before, and reserves its cost."""
        assert reserve >= 0
        assert self._returning is None, "a rebuilt clock is resumed first"
        entry = self._flows[self._items[pick.item].flow]
        self._advance_clock(pick)
        self._take(pick.item)
        self._start(entry, pick.item, reserve)
        self._index(entry)
        self._forget_passed()

    def adopt(self, item: I, flow: F, *, share: Share, reserve: int) -> None:
        """An item that a predecessor dispatched is running, with `reserve` left of what it had reserved."""
        assert item not in self._items, f"{item} is known"
        entry = self._remember(flow, share)
        self._items[item] = _Item(flow, None, None, 0, None)
        self._start(entry, item, reserve)
        self._retag(entry)

    def settle(self, item: I, cost: int = 0) -> None:
        """A running item has ended, however it did: what it reserved and did not use is given back.

        Args:
            cost: what it used and no counter names. A worker that settles its quanta one by one says it here; the
                scheduler hears it from the counters and leaves it out.
        """
        assert cost >= 0
        running = self._items.pop(item)
        assert running.rank is None, f"{item} was not dispatched"
        entry = self._flows[running.flow]
        self._refund(entry, item)
        entry.settled += cost * entry.inverse
        entry.num_running -= 1
        self._num_running -= 1
        self._retag(entry)
        self._rest(entry)

    def set_share(self, flow: F, share: Share) -> None:
        """A new share for a remembered flow: what was settled keeps its tag, what is reserved counts anew."""
        found = self._flows.get(flow)
        if found is not None and found.share != share:
            assert share.weight >= 1
            assert 0 <= share.base <= share.cap
            found.share = share
            found.inverse = TAG_SCALE // share.weight
            found.head = None
            self._index(found)

    def forgo(self, flow: F) -> None:
        """The flow had queued items and could not start one by its own doing (a bound of its own): it was not
        backlogged, so it keeps no credit of what it was denied and begins at the clock."""
        found = self._flows.get(flow)
        if found is not None:
            self._lift(found)
            self._retag(found)

    def set_apart(self, flow: F, *, is_apart: bool) -> None:
        """Whether the flow's items are offered to `select`'s test by themselves, not through another of equal need,
        because something of the flow's own may keep them from starting. Lasts until the flow is forgotten."""
        found = self._flows.get(flow)
        if found is not None and found.is_apart != is_apart:
            found.is_apart = is_apart
            found.head = None
            self._index(found)

    # ---- counters

    def count(self, source: str, totals: Mapping[F, int], share_of: Callable[[F], Share]) -> list[tuple[F, int]]:
        """Settles what a source's cumulative counters grew by; returns (flow, cost) for each that grew.

        Counters are of the whole life of one process. One that fell back is a new process's, and then all of the
        source's begin at zero.
        """
        counted = self._counted.setdefault(source, {})
        for flow, total in totals.items():
            if total < counted.get(flow, 0):
                counted.clear()
                break
        grown: list[tuple[F, int]] = []
        for flow, total in totals.items():
            cost = total - counted.get(flow, 0)
            if cost:
                counted[flow] = total
                self._charge(self._remember(flow, share_of(flow)), cost)
                grown.append((flow, cost))
        return grown

    def begin_counting(self, source: str, totals: Mapping[F, int]) -> None:
        """A source is new, and what it has counted until now is not to be charged."""
        self._counted[source] = dict(totals)

    def knows_source(self, source: str) -> bool:
        return source in self._counted

    def forget_source(self, source: str) -> None:
        """The source is gone for good."""
        self._counted.pop(source, None)

    # ---- succession

    def snapshot(self) -> Snapshot[F, I]:
        """What a successor needs; O(all flows and counters)."""
        return Snapshot(
            clock=self._clock,
            flows=tuple(
                FlowSnapshot(flow.key, flow.share.weight, flow.settled, flow.num_queued > 0)
                for flow in self._flows.values()
            ),
            reserved=tuple(
                (item, flow.key, left) for flow in self._flows.values() for item, left in flow.unspent.items()
            ),
            counted={source: dict(counted) for source, counted in self._counted.items()},
        )

    def restore(self, snapshot: Snapshot[F, I]) -> None:
        """Takes over a predecessor's clock, before anything else is done here. Until `resume` nothing is forgotten.

        Then each source's counters are counted, running items adopted and waiting ones pushed again; after `resume`
        the tag of a flow that was backlogged all the time is exactly what it would have been.
        """
        assert not self._flows
        assert not self._counted
        self._clock = snapshot.clock
        self._returning = {}
        for known in snapshot.flows:
            entry = self._remember(known.flow, Share(known.weight))
            entry.settled = known.settled
            if known.queued:
                self._returning[known.flow] = None
        self._counted = {source: dict(counted) for source, counted in snapshot.counted.items()}

    @property
    def is_restoring(self) -> bool:
        return self._returning is not None

    def resume(self) -> None:
        """Whoever was to come back has: V is brought up to date.

        The clock went on behind the snapshot. It passed no flow that stayed backlogged, so the least tag of those is
        where it may have come to; whoever was not among them begins there.
        """
        assert self._returning is not None, "nothing is being restored"
        returned = [self._flows[flow] for flow in self._returning if self._flows[flow].num_queued]
        if returned:
            self._clock = max(self._clock, min(flow.tag for flow in returned))
        for flow in self._flows.values():
            if flow.num_queued and flow.key not in self._returning:
                self._lift(flow)
                self._index(flow)
        self._returning = None
        for flow in list(self._flows.values()):
            if flow.key in self._flows:
                self._rest(flow)

    # ---- the rules; the property tests break each of them to see that it is noticed

    def _lift(self, flow: _Flow[F, I]) -> None:
        flow.settled += max(0, self._clock - flow.tag)

    def _advance_clock(self, pick: Pick[I, P]) -> None:
        self._clock = max(self._clock, pick.floor)

    def _reserve(self, flow: _Flow[F, I], item: I, cost: int) -> None:
        if cost:
            flow.unspent[item] = cost
            flow.reserved += cost

    def _refund(self, flow: _Flow[F, I], item: I) -> None:
        flow.reserved -= flow.unspent.pop(item, 0)

    def _cap(self, flow: _Flow[F, I]) -> int:
        """The flow's largest boost, in tag units."""
        return flow.share.cap * flow.inverse

    # ---- the contest

    def _index(self, flow: _Flow[F, I]) -> None:
        """Brings the flow's place in the contest up to date after a change of its queue, its tag or its share."""
        if not flow.num_queued:
            if flow.head is not None:
                assert flow.order_of is not None
                self._plain.drop(flow.key)
                flow.order_of.drop(flow.key)
                flow.head = flow.full_us = flow.order_of = None
            return
        item = self._first(flow)
        if item == flow.head:
            self._retag(flow)
            return
        flow.head = item
        self._show(flow)

    def _retag(self, flow: _Flow[F, I]) -> None:
        """As `_index`, where only the tag can have changed."""
        if flow.head is not None and flow.settled + flow.reserved * flow.inverse != flow.shown:
            self._show(flow)

    def _show(self, flow: _Flow[F, I]) -> None:
        assert flow.head is not None
        flow.shown = flow.settled + flow.reserved * flow.inverse
        self._plain.put(flow.key, flow.shown, flow.order, self._need(flow, self._items[flow.head]))
        self._boost(flow)

    def _boost(self, flow: _Flow[F, I]) -> None:
        """Puts a flow among those that rise, or among those that have their cap."""
        assert flow.head is not None
        item = self._items[flow.head]
        base, cap = flow.share.base * flow.inverse, self._cap(flow)
        full_us = item.urgent_us
        if cap <= base:
            full_us = self._now_us
        elif self._aging:
            aged_us = item.since_us - (base - cap) // self._aging
            full_us = aged_us if full_us is None else min(full_us, aged_us)
        is_full = full_us is not None and full_us <= self._now_us
        if flow.order_of is not None and flow.order_of is not (self._full if is_full else self._rising):
            flow.order_of.drop(flow.key)
        if is_full:
            flow.full_us, flow.order_of = None, self._full
            self._full.put(flow.key, flow.shown - cap, flow.order, self._need(flow, item))
            return
        flow.order_of = self._rising
        self._rising.put(flow.key, flow.shown - base + self._aging * item.since_us, flow.order, self._need(flow, item))
        if full_us != flow.full_us:
            flow.full_us = full_us
            if full_us is not None:
                heapq.heappush(self._filling, (full_us, flow.order, flow.key))
                self._compact_filling()

    def _need(self, flow: _Flow[F, I], item: _Item[F]) -> Hashable:
        return (flow.key, item.need) if flow.is_apart else item.need

    def _fill_boosts(self, now_us: int) -> None:
        """Moves the flows on whose boost has reached its cap by now."""
        assert now_us >= self._now_us, "time falls"
        self._now_us = now_us
        while self._filling and self._filling[0][0] <= now_us:
            full_us, order, key = heapq.heappop(self._filling)
            flow = self._flows.get(key)
            if flow is not None and flow.order == order and flow.full_us == full_us:
                self._boost(flow)

    def _compact_filling(self) -> None:
        if len(self._filling) > 2 * len(self._rising) + _COMPACT_SLACK:
            flows = [self._flows[entry[2]] for entry in self._filling if entry[2] in self._rising]
            self._filling = [(f.full_us, f.order, f.key) for f in dict.fromkeys(flows) if f.full_us is not None]
            heapq.heapify(self._filling)

    def _first_boosted(self) -> tuple[F, Hashable] | None:
        """The flow with the least boosted tag, and its need."""
        rising, full = self._rising.first(), self._full.first()
        if rising is None:
            return (full[0][2], full[1]) if full is not None else None
        if full is not None:
            (key, order, flow), need = full
            if (key, order) < (rising[0][0] - self._aging * self._now_us, rising[0][1]):
                return flow, need
        return rising[0][2], rising[1]

    def _head_of(self, flow: F) -> I:
        item = self._flows[flow].head
        assert item is not None, "only flows with queued items stand in the contest"
        return item

    def _floor(self, fits: Callable[[I], P | None], fitting: dict[Hashable, bool]) -> int:
        """The least tag of a flow that can be started. `fitting` has the needs that were asked for already."""
        first = self._plain.first()
        assert first is not None
        if fitting.get(first[1]):
            return first[0][0]
        for (tag, _, flow), need in itertools.chain((first,), self._plain.heads()):
            if need not in fitting:
                fitting[need] = fits(self._head_of(flow)) is not None
            if fitting[need]:
                return tag
        raise AssertionError("one flow was found to fit")

    # ---- books

    def _charge(self, flow: _Flow[F, I], cost: int) -> None:
        """Counts work that was done for a flow, whether it has items here or not; it eats reservations oldest first."""
        flow.settled += cost * flow.inverse
        while cost and flow.unspent:
            item, left = flow.unspent.popitem(last=False)
            used = min(cost, left)
            cost -= used
            flow.reserved -= used
            if left > used:
                flow.unspent[item] = left - used
                flow.unspent.move_to_end(item, last=False)
        self._retag(flow)
        self._rest(flow)

    def _remember(self, flow: F, share: Share) -> _Flow[F, I]:
        entry = self._flows.get(flow)
        if entry is None:
            entry = self._flows[flow] = _Flow(flow, self._next_order, share)
            self._next_order += 1
            self._lift(entry)
        elif entry.share != share:
            self.set_share(flow, share)
        return entry

    def _start(self, flow: _Flow[F, I], item: I, reserve: int) -> None:
        flow.num_running += 1
        self._num_running += 1
        self._reserve(flow, item, reserve)

    def _take(self, item: I) -> _Flow[F, I]:
        """Takes a queued item out of its flow's queue."""
        queued = self._items[item]
        assert queued.rank is not None, f"{item} is not queued"
        queued.rank = None
        entry = self._flows[queued.flow]
        entry.num_queued -= 1
        self._num_queued -= 1
        if len(entry.queue) > 2 * entry.num_queued + _COMPACT_SLACK:
            entry.queue = [e for e in entry.queue if self._is_queued(e)]
            heapq.heapify(entry.queue)
        return entry

    def _is_queued(self, entry: tuple[Rank, I]) -> bool:
        item = self._items.get(entry[1])
        return item is not None and item.rank is entry[0]

    def _first(self, flow: _Flow[F, I]) -> I:
        queue, items = flow.queue, self._items
        while True:
            rank, first = queue[0]
            item = items.get(first)
            if item is not None and item.rank is rank:
                return first
            heapq.heappop(queue)

    def _rest(self, flow: _Flow[F, I]) -> None:
        """Forgets a flow that has become idle, or remembers to once the clock has passed it."""
        if self._returning is not None or not flow.idle:
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
            counts = running if item.rank is None else queued
            counts[item.flow] = counts.get(item.flow, 0) + 1
        assert sum(queued.values()) == self._num_queued
        assert sum(running.values()) == self._num_running
        for contest in (self._plain, self._rising, self._full):
            contest.check_invariants()
        backlogged = [flow for flow in self._flows.values() if flow.num_queued]
        assert len(self._plain) == len(backlogged)
        assert len(self._rising) + len(self._full) == len(backlogged)
        for flow in self._flows.values():
            assert flow.num_queued == queued.get(flow.key, 0)
            assert flow.num_running == running.get(flow.key, 0)
            assert flow.reserved == sum(flow.unspent.values())
            assert all(left > 0 and self._items[item].flow == flow.key for item, left in flow.unspent.items())
            assert flow.num_running or not flow.reserved
            assert not flow.idle or flow.tag > self._clock or self._returning is not None
            if flow.num_queued:
                assert (flow.head, flow.shown) == (self._first(flow), flow.tag)
                assert flow.key in self._plain
                assert (flow.full_us is None) or flow.key in self._rising
            else:
                assert flow.head is None


class ArrivalQueue(FairQueue[F, I]):
    """First come, first served, with the books of the fair queue: what fair queuing is compared with.

    Of the flows whose first item can be started, the one whose first item came first is next; weights, boosts,
    priorities and deadlines count for nothing. Ranks' `order` must be unique over all flows and grow as items come.
    Tags, reservations, counters and snapshots go on, so that an owner may change from the one queue to the other.
    """

    def push(
        self,
        item: I,
        flow: F,
        *,
        share: Share,
        need: Hashable,
        rank: Rank,
        since_us: int = 0,
        urgent_us: int | None = None,
    ) -> None:
        by_arrival = Rank(0, 0, rank.order)
        super().push(item, flow, share=share, need=need, rank=by_arrival, since_us=since_us, urgent_us=urgent_us)

    def _boost(self, flow: _Flow[F, I]) -> None:
        assert flow.head is not None
        item = self._items[flow.head]
        assert item.rank is not None, "a first item is queued"
        flow.order_of = self._full
        self._full.put(flow.key, item.rank.order, flow.order, self._need(flow, item))
