"""The choice among flows with queued items: their places in the orders of the tags. Pure; written by its `FairQueue`.

All boosts rise at one pace, so a flow changes orders once, when its boost reaches its cap.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

from manylora_shared.fairness.flow_group import Place
from manylora_shared.fairness.flow_order import FlowOrder
from manylora_shared.fairness.seam import TAG_SCALE, Pick

_US_PER_S = 1_000_000
NEVER_US = 1 << 62
_COMPACT_SLACK = 64  # A heap is rebuilt once it has this many entries more than twice the valid ones.

F = TypeVar("F", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P")


class Queued(NamedTuple, Generic[I]):
    """A queued item, and its entry in its flow's heap: the first four compare."""

    urgency: int
    due_us: int
    order: int
    serial: int
    item: I
    need: Hashable
    since_us: int
    urgent_us: int  # when its flow's boost is at its cap, however short it waited
    flow: Any


_NEED: Final = 5
_SINCE_US: Final = 6
_URGENT_US: Final = 7
assert Queued._fields[_NEED : _URGENT_US + 1] == ("need", "since_us", "urgent_us")


class Contender(Generic[F, I]):
    """What the contest has of a flow. Its owner sets what follows from the share, and head."""

    __deletable__ = ("plain", "boosted")  # for mypyc: a compiled class's attributes are for good otherwise
    __slots__ = ("base", "boosted", "cap", "fill_us", "fills_at", "head", "is_apart", "is_full", "key", "need",
                 "order", "plain", "served_us")  # fmt: skip

    def __init__(self, key: F, order: int) -> None:
        self.key = key
        self.order = order  # unique: decides between equal tags
        self.base = 0
        self.cap = 0  # as `base`, in tag units
        self.fill_us = NEVER_US  # how long its age alone takes to bring the boost to the cap
        self.served_us = -NEVER_US  # the last dispatch
        self.is_apart = False
        self.head: Queued[I] | None = None  # as it stands in the contest; None: the flow does not
        self.need: Hashable = None
        self.plain: Place[Contender[F, I]] = Place(self, order)  # its key is the tag by which it stands there
        self.boosted: Place[Contender[F, I]] = Place(self, order)
        self.is_full = False  # whether `boosted` is in `Contest.full`
        self.fills_at = NEVER_US  # of its valid entry in `Contest._filling`


class Contest(Generic[F, I]):
    def __init__(self, aging_per_s: int) -> None:
        self._aging = aging_per_s * TAG_SCALE // _US_PER_S  # tag units per microsecond
        self.now_us = 0
        self.plain: FlowOrder[Contender[F, I]] = FlowOrder()  # by tag
        self.rising: FlowOrder[Contender[F, I]] = FlowOrder()  # by what the boosted tag would have been at time 0
        self.full: FlowOrder[Contender[F, I]] = FlowOrder()  # by the boosted tag
        # (when, order, flow) of the rising; entries may be early or stale
        self._filling: list[tuple[int, int, Contender[F, I]]] = []

    def fill_us(self, base: int, cap: int) -> int:
        if cap <= base:
            return -NEVER_US
        return -((base - cap) // self._aging) if self._aging else NEVER_US

    def put(self, flow: Contender[F, I], tag: int) -> None:
        head = flow.head
        assert head is not None
        # By their names they cost four times as much, and all at once are touched in memory, the others too.
        need, since_us, full_us = head[_NEED], head[_SINCE_US], head[_URGENT_US]
        if since_us < flow.served_us:
            since_us = flow.served_us
        if flow.is_apart:
            need = (flow.key, need)
        flow.need = need
        order, place = self.plain, flow.plain
        # Mostly the flow stands unsorted and its tag rises. It is written out, in `retag` too: with calls of
        # `FlowOrder.put` a decision of the scheduler has 1.1 % more instructions.
        if place.group is order.unsorted:
            place.key, place.need = tag, need
            if tag < place.floor:
                order.unsorted.enter(place)
        else:
            order.put(place, tag, need)

        # Among those that rise, or among those that have their cap.
        aged_us = since_us + flow.fill_us
        if aged_us < full_us:
            full_us = aged_us
        place, is_full = flow.boosted, full_us <= self.now_us
        if is_full is not flow.is_full:
            if place.group is not None:
                (self.full if flow.is_full else self.rising).drop(place)
            flow.is_full = is_full
        if is_full:
            order, key = self.full, tag - flow.cap
        else:
            order, key = self.rising, tag - flow.base + self._aging * since_us
            if full_us < flow.fills_at:
                flow.fills_at = full_us
                self._fill_later(flow)
        if place.group is order.unsorted:
            place.key, place.need = key, need
            if key < place.floor:
                order.unsorted.enter(place)
        else:
            order.put(place, key, need)

    def retag(self, flow: Contender[F, I], tag: int) -> None:
        """As `put`, for a flow that stands here and of which only the tag has changed."""
        order, place = self.plain, flow.plain
        grown = tag - place.key
        if place.group is order.unsorted:
            place.key = tag
            if tag < place.floor:
                order.unsorted.enter(place)
        else:
            order.put(place, tag, place.need)
        order, place = self.full if flow.is_full else self.rising, flow.boosted
        key = place.key + grown
        if place.group is order.unsorted:
            place.key = key
            if key < place.floor:
                order.unsorted.enter(place)
        else:
            order.put(place, key, place.need)

    def _fill_later(self, flow: Contender[F, I]) -> None:
        heapq.heappush(self._filling, (flow.fills_at, flow.order, flow))
        if len(self._filling) > 2 * self.rising.size + _COMPACT_SLACK:
            # Two entries of one flow may be of the same time.
            self._filling = list(dict.fromkeys([entry for entry in self._filling if entry[0] == entry[2].fills_at]))
            heapq.heapify(self._filling)

    def drop(self, flow: Contender[F, I]) -> None:
        self.plain.drop(flow.plain)
        (self.full if flow.is_full else self.rising).drop(flow.boosted)
        flow.head = None
        flow.fills_at = NEVER_US

    def forget(self, flow: Contender[F, I]) -> None:
        if flow.head is not None:
            self.drop(flow)
        del flow.plain, flow.boosted  # they refer to the flow

    # ---- the choice

    def select(self, fits: Callable[[I], P | None], now_us: int) -> Pick[I, P] | None:
        assert now_us >= self.now_us, "time falls"
        self.now_us = now_us
        if self._filling and self._filling[0][0] <= now_us:
            self._fill_boosts()
        first = self._first_boosted()
        if first is None or first.head is None:
            return None
        # Nearly always the first flow can be started, and so can the one with the least tag.
        item = first.head.item
        place = fits(item)
        if place is not None:
            least = self.plain.first()
            assert least is not None
            if least.flow is first or least.flow.need == first.need or fits(_head(least.flow)) is not None:
                return tuple.__new__(Pick, (item, place, least.key, None))  # as Pick(...), without a Python call
            return Pick(item, place, self._floor(fits, {first.need: True, least.flow.need: False}), None)
        fitting = {first.need: False}
        for flow in self._in_order(self.rising.heads(), self.full.heads()):
            if flow.need not in fitting:
                place = fits(_head(flow))
                fitting[flow.need] = place is not None
                if place is not None:
                    return Pick(_head(flow), place, self._floor(fits, fitting), item)
        return None

    def select_one_by_one(self, fits: Callable[[F, I], P | None], now_us: int, *, limit: int) -> Pick[I, P] | None:
        assert now_us >= self.now_us, "time falls"
        self.now_us = now_us
        if self._filling and self._filling[0][0] <= now_us:
            self._fill_boosts()
        for flow in self._first_in_order(limit):
            item = _head(flow)
            place = fits(flow.key, item)
            if place is not None:
                least = self.plain.first()
                assert least is not None
                return Pick(item, place, least.key, None)
        return None

    def _fill_boosts(self) -> None:
        while self._filling and self._filling[0][0] <= self.now_us:
            at_us, _, flow = heapq.heappop(self._filling)
            if at_us == flow.fills_at:
                flow.fills_at = NEVER_US
                if flow.head is not None and not flow.is_full:
                    self.put(flow, flow.plain.key)

    def _first_boosted(self) -> Contender[F, I] | None:
        rising = self.rising.first()
        if not self.full.size:
            return rising.flow if rising is not None else None
        full = self.full.first()
        assert full is not None
        if rising is None:
            return full.flow
        key = rising.key - self._aging * self.now_us
        is_full_first = full.key < key or (full.key == key and full.order < rising.order)
        return full.flow if is_full_first else rising.flow

    def _first_in_order(self, limit: int) -> list[Contender[F, I]]:
        if not self.full.size:
            return [place.flow for place in self.rising.first_places(limit)]
        if not self.rising.size:
            return [place.flow for place in self.full.first_places(limit)]
        in_order = self._in_order(self.rising.first_places(limit), self.full.first_places(limit))
        return list(itertools.islice(in_order, limit))

    def _in_order(
        self, rising: Iterable[Place[Contender[F, I]]], full: Iterable[Place[Contender[F, I]]]
    ) -> Iterator[Contender[F, I]]:
        if not self.full.size:
            for place in rising:
                yield place.flow
            return
        if not self.rising.size:
            for place in full:
                yield place.flow
            return
        # Each is read as far as it is needed.
        for _, _, flow in heapq.merge(_keyed(rising, self._aging * self.now_us), _keyed(full, 0)):
            yield flow

    def _floor(self, fits: Callable[[I], P | None], fitting: dict[Hashable, bool]) -> int:
        # `fitting` has the needs that were asked for already.
        first = self.plain.first()
        assert first is not None
        for place in itertools.chain((first,), self.plain.heads()):
            flow = place.flow
            if flow.need not in fitting:
                fitting[flow.need] = fits(_head(flow)) is not None
            if fitting[flow.need]:
                return place.key
        raise AssertionError("one flow was found to fit")

    def check_invariants(self) -> None:
        for order in (self.plain, self.rising, self.full):
            order.check_invariants()
        assert self.plain.size == self.rising.size + self.full.size


class ArrivalContest(Contest[F, I]):
    """First come, first served."""

    def put(self, flow: Contender[F, I], tag: int) -> None:
        head = flow.head
        assert head is not None
        flow.need = (flow.key, head.need) if flow.is_apart else head.need
        flow.is_full = True
        self.plain.put(flow.plain, tag, flow.need)
        self.full.put(flow.boosted, head.order, flow.need)

    def retag(self, flow: Contender[F, I], tag: int) -> None:
        self.plain.put(flow.plain, tag, flow.need)


def _keyed(places: Iterable[Place[Contender[F, I]]], aged: int) -> Iterator[tuple[int, int, Contender[F, I]]]:
    for place in places:
        yield place.key - aged, place.order, place.flow


def _head(flow: Contender[F, I]) -> I:
    assert flow.head is not None, "only flows with queued items stand in the contest"
    return flow.head.item
