"""The fair queue: the properties of fairness_suite, mutants that these must catch, and the class's own contract.

`--fair-schedules N` runs N random schedules instead of the default few hundred; `make fairness` runs 10,000.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.fairness.contest import Contender, Contest
from manylora_shared.fairness.fair_queue import ArrivalQueue, FairQueue, FlowBooks
from manylora_shared.fairness.flow_group import Place
from manylora_shared.fairness.flow_order import FlowOrder
from manylora_shared.fairness.seam import TAG_SCALE, Pick, Rank, Share
from manylora_shared.process.heap import collector_paused

from tests.properties import fairness_suite as suite
from tests.properties.fairness_suite import charge, push, start

NUM_SEEDS = 300
"""Schedules that a mutant has to survive."""


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), num_actions=st.integers(1, 100))
def test_any_schedule_stays_within_the_bound(seed: int, num_actions: int) -> None:
    suite.random_schedule(FairQueue, seed, num_actions)


@pytest.mark.long
def test_spread_against_its_bound(fair_schedules: int) -> None:
    """Every schedule's spread is within the formula, and some come close to it: the formula has no slack to hide in."""
    ratios = sorted(suite.random_schedule(FairQueue, seed).worst for seed in range(fair_schedules))
    middle = ratios[len(ratios) // 2]
    print(f"\nspread / bound over {len(ratios)} schedules: median {middle:.3f}, largest {ratios[-1]:.3f}, 0 violations")
    assert 0.7 < ratios[-1] <= 1.0


def test_the_bound_holds_where_weights_change(fair_schedules: int) -> None:
    for seed in range(fair_schedules // 4):
        suite.random_schedule(FairQueue, seed, reweighs=True)


def test_dispatch_is_within_one_item_of_each_flow_where_costs_are_known() -> None:
    for seed in range(30):
        suite.exact_reservations(FairQueue, seed)


def test_weights_are_honoured() -> None:
    suite.weights_are_honoured(FairQueue)


@pytest.mark.parametrize("running_meanwhile", [False, True])
def test_idling_banks_nothing(running_meanwhile: bool) -> None:
    suite.idling_banks_nothing(FairQueue, running_meanwhile)


def test_a_flood_delays_nobody_else() -> None:
    suite.flood_delays_nobody(FairQueue)


def test_boosts_end_at_their_cap() -> None:
    suite.boosts_end_at_their_cap(FairQueue)


def test_age_is_of_who_gets_nothing() -> None:
    suite.age_is_of_who_gets_nothing(FairQueue)


@pytest.mark.long
def test_equal_histories_give_equal_choices() -> None:
    for seed in range(20):
        first = suite.random_schedule(FairQueue, seed)
        assert suite.random_schedule(FairQueue, seed).dispatched == first.dispatched


Queue = FairQueue[str, int]
Flow = FlowBooks[str, int]


class ClockFromBoostedPicks(Queue):
    def _advance_clock(self, pick: Pick[int, Any]) -> None:
        self.virtual_time = max(self.virtual_time, self._items[pick.item].flow.tag)


class CapOffByOne(Queue):
    def _cap(self, flow: Flow) -> int:
        return super()._cap(flow) + 1 if flow.share.cap else 0


class CapOneUnitShort(Queue):
    def _cap(self, flow: Flow) -> int:
        return max(0, super()._cap(flow) - flow.inverse)


class CapForgotten(Queue):
    def _cap(self, flow: Flow) -> int:
        return super()._cap(flow) * 1000


class AgeOfTheItem(Queue):
    def dispatch(self, pick: Pick[int, Any], reserve: int) -> None:
        flow = self._items[pick.item].flow
        before = flow.served_us
        super().dispatch(pick, reserve)
        flow.served_us = before


class ReservationsKept(Queue):
    """Work is charged on top of its own reservation."""

    def _charge(self, flow: Flow, cost: int) -> None:
        flow.settled += cost * flow.inverse
        self._move(flow)
        self.rest(flow)


class CountersAsIncrements(Queue):
    """A report that comes twice is counted twice."""

    def count(self, source: str, totals: Any, share_of: Any, *, are_all: bool = False) -> Any:
        self.counted.pop(source, None)
        return super().count(source, totals, share_of, are_all=are_all)


class HeadsTakenForTags(Queue):
    """A flow whose first item is another one is shown as if only its tag had changed."""

    def _move(self, flow: Flow) -> None:
        self._moved[flow] = flow.head is None


class PlainTagsAlone(Contest[Any, Any]):
    def retag(self, flow: Contender[Any, Any], tag: int) -> None:
        self.plain.put(flow.plain, tag, flow.need)


class BoostedTagsLeftBehind(Queue):
    _contest_type = PlainTagsAlone


class AdoptedReservationsLost(Queue):
    def adopt(self, item: int, flow: str, *, share: Share, reserve: int) -> None:
        super().adopt(item, flow, share=share, reserve=2 * reserve)


class SnapshotWithoutCounters(Queue):
    def begin_counting(self, source: str, totals: Any) -> None:
        """As the snapshot has them."""


MUTANTS = [
    *(suite.broken(rule, FairQueue) for rule in suite.SHARED_MUTANTS),
    ClockFromBoostedPicks,
    CapOffByOne,
    CapOneUnitShort,
    CapForgotten,
    AgeOfTheItem,
    ReservationsKept,
    CountersAsIncrements,
    AdoptedReservationsLost,
    SnapshotWithoutCounters,
    HeadsTakenForTags,
    BoostedTagsLeftBehind,
]


@pytest.mark.wide
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_the_suite_notices(mutant: type[Queue]) -> None:
    with pytest.raises(AssertionError):
        suite.run_suite(mutant, range(NUM_SEEDS))


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [
        (ClockFromBoostedPicks, 144),
        (suite.NoLift, 106),
        (suite.LiftToTheLeastOfTheOthers, 216),
        (suite.ChargeAfter, 2),
        (suite.RefundForgotten, 1),
        (suite.RefundTwice, 1),
        (CapForgotten, 7),
        (suite.StoppedClock, 48),
        (suite.WeightsIgnored, 5),
    ],
)
def test_the_bound_alone_notices(mutant: type, seed: int) -> None:
    """Without the brute-force check of each choice: the measured spread passes the formula."""
    suite.random_schedule(FairQueue, seed, strict=False)
    make = mutant if issubclass(mutant, FairQueue) else suite.broken(mutant, FairQueue)
    with pytest.raises(AssertionError, match="apart, bound"):
        suite.random_schedule(make, seed, strict=False)


def test_inside_a_flow_priority_then_due_then_order() -> None:
    queue: FairQueue[str, str] = FairQueue()
    items = [("a", 0, 9), ("b", 5, 9), ("c", 5, 9), ("d", -1, 0), ("e", 0, 3), ("f", 0, 9)]
    for order, (item, priority, due_us) in enumerate(items):
        push(queue, item, "flow", order, priority=priority, due_us=due_us)
    assert [start(queue, 1) for _ in items] == ["b", "c", "e", "a", "f", "d"]


def test_a_flow_whose_first_item_fits_nowhere_keeps_its_tag_and_blocks_nobody() -> None:
    queue: FairQueue[str, str] = FairQueue()
    push(queue, "large", "patient", 0, need=8)
    push(queue, "behind", "patient", 1)
    for i in range(10):
        push(queue, f"small{i}", "other", 2 + i)
    tag = queue.tag_of("patient")
    for i in range(10):
        pick = queue.select(lambda item: None if item == "large" else True, 0)
        assert pick is not None
        assert (pick.item, pick.passed_over) == (f"small{i}", "large")
        queue.dispatch(pick, 10)
    assert start(queue, 1, without="large") is None
    assert queue.tag_of("patient") == tag
    queue.check_invariants()


def test_removal_of_a_first_item_brings_up_the_next() -> None:
    queue: FairQueue[str, str] = FairQueue()
    push(queue, "a", "flow", 0, need=4)
    push(queue, "b", "flow", 1)
    queue.remove("a")
    queue.check_invariants()
    pick = queue.select(lambda _: True, 0)
    assert pick is not None
    assert pick.item == "b"
    queue.remove("b")
    assert queue.num_flows == 0
    queue.check_invariants()


def test_an_item_is_refunded_once() -> None:
    queue: FairQueue[str, str] = FairQueue()
    push(queue, "a", "flow", 0)
    push(queue, "b", "flow", 1)
    before = queue.tag_of("flow")
    start(queue, 100)
    assert queue.tag_of("flow") == before + 100 * TAG_SCALE
    queue.settle("a", 30)
    assert queue.tag_of("flow") == before + 30 * TAG_SCALE
    with pytest.raises(KeyError):
        queue.settle("a", 30)
    with pytest.raises(AssertionError):
        queue.settle("b")


def test_counters_name_flows_and_need_no_item() -> None:
    queue: FairQueue[str, str] = FairQueue()
    push(queue, "a", "known", 0)
    charge(queue, "stranger", 10, weight=2)
    assert queue.tag_of("stranger") - queue.virtual_time == 10 * TAG_SCALE // 2
    assert queue.num_flows == 2
    queue.check_invariants()


def test_counters_that_fell_back_are_a_new_process() -> None:
    queue: FairQueue[str, str] = FairQueue()
    push(queue, "a", "x", 0)
    shares = {"x": Share(1), "y": Share(1)}
    queue.begin_counting("w", {"x": 1_000, "y": 1_000})
    assert queue.count("w", {"x": 1_010}, shares.__getitem__) == [("x", 10)]
    assert queue.count("w", {"x": 1_010, "y": 1_001}, shares.__getitem__) == [("y", 1)]
    assert queue.count("w", {"x": 3}, shares.__getitem__) == [("x", 3)]
    assert queue.count("w", {"y": 4}, shares.__getitem__) == [("y", 4)]
    assert queue.count("other", {"y": 4}, shares.__getitem__) == [("y", 4)]


def test_where_all_counters_are_told_one_that_is_missing_fell_back() -> None:
    queue: FairQueue[str, str] = FairQueue()
    push(queue, "a", "x", 0)
    shares = {"x": Share(1), "y": Share(1)}
    queue.begin_counting("w", {"x": 1_000, "y": 10, "z": 0})
    assert queue.count("w", {"x": 1_010, "y": 10}, shares.__getitem__, are_all=True) == [("x", 10)]
    assert queue.count("w", {"y": 12}, shares.__getitem__, are_all=True) == [("y", 12)]
    assert queue.count("w", {"x": 5}, shares.__getitem__) == [("x", 5)]
    assert queue.count("w", {}, shares.__getitem__, are_all=True) == []
    assert queue.count("w", {"y": 7}, shares.__getitem__) == [("y", 7)]


def test_a_new_weight_counts_from_now_on_and_the_tag_stays() -> None:
    """V may have come to the tag, reservations included: with its reservations at a new weight the flow would be far
    behind V, and so before all newcomers, which begin there."""
    queue: FairQueue[str, str] = FairQueue()
    for i in range(3):
        push(queue, f"{i}", "flow", i)
    start(queue, 100)
    charge(queue, "flow", 40)
    assert queue.tag_of("flow") == 100 * TAG_SCALE
    queue.set_share("flow", Share(4))
    assert queue.tag_of("flow") == 100 * TAG_SCALE
    charge(queue, "flow", 100, weight=4)
    assert queue.tag_of("flow") == 100 * TAG_SCALE, "reserved before"
    charge(queue, "flow", 140, weight=4)
    assert queue.tag_of("flow") == 110 * TAG_SCALE
    queue.set_share("flow", Share(1))
    assert queue.tag_of("flow") == 110 * TAG_SCALE
    queue.check_invariants()


def test_a_boost_grows_with_the_wait_and_jumps_when_urgent() -> None:
    queue: FairQueue[str, str] = FairQueue(aging_per_s=10)
    ahead, plain = Share(1, 0, 1_000), Share(1)
    queue.push("old", "ahead", share=ahead, need=1, rank=Rank(0, 0, 0), urgent_us=60_000_000)
    push(queue, "new", "plain", 1)
    queue.count("source", {"ahead": 100}, lambda _: ahead)
    assert plain == queue.books["plain"].share

    def next_at(seconds: float) -> str | None:
        pick = queue.select(lambda _: True, int(seconds * 1_000_000))
        return pick.item if pick is not None else None

    assert next_at(9.9) == "new"
    assert next_at(10.1) == "old"
    queue.count("source", {"ahead": 1_050}, lambda _: ahead)
    assert next_at(59.9) == "new"
    assert next_at(60) == "new", "50 beyond its cap"
    queue.count("source", {"ahead": 1_050, "plain": 51}, lambda flow: ahead if flow == "ahead" else plain)
    assert next_at(60) == "old", "at its full cap, long before its wait alone would have brought it there"
    queue.check_invariants()


def test_state_stays_with_the_active_flows() -> None:
    queue: FairQueue[int, int] = FairQueue()
    push(queue, -1, -1, 0)
    push(queue, -2, -1, 1)
    start(queue, 1)
    for i in range(5_000):
        push(queue, i, i, i, need=i % 3)
        while queue.num_queued > 1:
            item = start(queue, 5, without=-2)
            assert item >= 0
            charge(queue, item, 3)
            queue.settle(item)
        if i % 100 == 0:
            assert start(queue, 50) == -2
            queue.settle(-2, 50)
            push(queue, -2, -1, 0)
    queue.check_invariants()
    assert queue.num_flows < 300
    assert len(queue._contest.plain._firsts) < 300


def test_flows_that_come_and_go_while_nothing_is_chosen_leave_nothing() -> None:
    """As in a cluster without a worker, where requests wait until their deadline."""
    queue: FairQueue[int, int] = FairQueue()
    push(queue, -1, -1, 0)
    for i in range(1_000):
        push(queue, i, i, i)
        queue.remove(i)
    assert queue.num_flows == 1
    assert len(queue._moved) <= 1
    queue.check_invariants()


def test_forgotten_flows_need_no_garbage_collection() -> None:
    """The scheduler's collector runs seldom: what is gone has to go by itself."""
    queue: FairQueue[int, int] = FairQueue()
    push(queue, -1, -1, 0)
    gc.collect()
    with collector_paused():
        for i in range(300):
            push(queue, i, i, 3 * i, need=2 + i % 3)
            push(queue, 1000 + i, i, 3 * i + 1, need=2)
            if i % 2:
                queue.remove(1000 + i)  # behind the first, then never looked at again
            while queue.num_queued > 1:
                item = start(queue, 5, without=-1)
                queue.settle(item, 0)
        assert start(queue, 5, without=-1) is None
        alive = [flow for flow in gc.get_objects() if type(flow) is FlowBooks and type(flow.key) is int]
        assert len(alive) == queue.num_flows < 10


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_in_order_of_arrival_the_first_that_fits_is_next(data: st.DataObject) -> None:
    """Against a list: of the flows' first items, the earliest that fits, whatever weights, ranks and charges say."""
    queue: ArrivalQueue[str, int] = ArrivalQueue(aging_per_s=32)
    waiting: list[tuple[int, str, int]] = []
    shares = {"light": Share(1), "heavy": Share(1000, 512, 1024), "third": Share(7, 0, 64)}
    for order in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(("push", "push", "start", "remove", "charge")))
        flow = data.draw(st.sampled_from(sorted(shares)))
        if action == "push":
            need = data.draw(st.integers(1, 2))
            rank = Rank(data.draw(st.integers(-100, 100)), data.draw(st.integers(0, 10)), order)
            queue.push(order, flow, share=shares[flow], need=need, rank=rank, since_us=order, urgent_us=0)
            waiting.append((order, flow, need))
        elif action == "charge":
            queue.count("source", {flow: 1_000 * order}, shares.__getitem__)
        elif action == "remove" and waiting:
            item, _, _ = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            queue.remove(item)
        elif action == "start":
            room = data.draw(st.integers(1, 2))
            needs = {item: need for item, _, need in waiting}
            firsts = {flow: (item, flow, need) for item, flow, need in reversed(waiting)}.values()
            expected = min((first for first in firsts if first[2] <= room), default=None)
            pick = queue.select(lambda item, needs=needs, room=room: needs[item] <= room or None, order)
            assert (pick and pick.item) == (expected and expected[0])
            if pick is not None:
                queue.dispatch(pick, 10)
                waiting.remove(expected)
        queue.check_invariants()


# ---- what depends on the flow and not on the need


def _queue_of(tags: dict[str, int], needs: dict[str, str] | None = None) -> FairQueue[str, int]:
    """Flows with one queued item each (its number: the flow's place in `tags`), whose tags are these costs."""
    queue: FairQueue[str, int] = FairQueue()
    for number, flow in enumerate(tags):
        queue.push(number, flow, share=Share(1), need=(needs or {}).get(flow, ""), rank=Rank(0, 0, number))
    queue.count("worker", tags, lambda flow: Share(1))
    return queue


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_first_flows_are_the_least_whatever_they_need(data: st.DataObject) -> None:
    order: FlowOrder[int] = FlowOrder()
    order.unsorted._shift = data.draw(st.sampled_from((0, 2, 40)))  # buckets of one key, of four, and one for all
    places = {flow: Place(flow, flow) for flow in range(16)}
    keys: dict[int, int] = {}
    needs: dict[int, str] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        flow = data.draw(st.integers(0, 15))
        if data.draw(st.integers(0, 4)):
            keys[flow], needs[flow] = data.draw(st.integers(0, 9)), data.draw(st.sampled_from("abc"))
            order.put(places[flow], keys[flow], needs[flow])
        elif keys.pop(flow, None) is not None:
            order.drop(places[flow])
        order.check_invariants()
        in_order = sorted(keys, key=lambda f: (keys[f], f))
        if data.draw(st.booleans()):
            first = order.first()
            assert (first and first.flow) == (in_order[0] if in_order else None)
        if data.draw(st.booleans()):
            firsts = [
                next(f for f in in_order if needs[f] == need) for need in dict.fromkeys(needs[f] for f in in_order)
            ]
            assert [place.flow for place in order.heads()] == firsts
        assert order.size == len(keys)
    limit = data.draw(st.integers(1, 8))
    assert [place.flow for place in order.first_places(limit)] == sorted(keys, key=lambda f: (keys[f], f))[:limit]


@pytest.mark.parametrize("shift", [0, 30, 48])
def test_thousands_of_flows_stay_in_order_whatever_the_width_of_the_buckets_was(shift: int) -> None:
    """As tags move: the first rises, others rise or fall, some go and come. Only a few stand in the heap in the end."""
    rng = random.Random(shift)
    order: FlowOrder[int] = FlowOrder()
    order.unsorted._shift = shift
    places = {flow: Place(flow, flow) for flow in range(2_000)}
    keys = {flow: rng.randrange(1 << 45) for flow in places}
    for flow, key in keys.items():
        order.put(places[flow], key, "")
    for turn in range(12_000):
        first = order.first()
        assert first is not None
        if turn % 50 == 0:
            assert (first.key, first.flow) == min((key, flow) for flow, key in keys.items())
            assert first.key == keys[first.flow]
            if turn % 1_000 == 0:
                order.check_invariants()
                limit = rng.choice((1, 8, 40))
                found = [place.flow for place in order.first_places(limit)]
                assert found == sorted(keys, key=lambda flow: (keys[flow], flow))[:limit]
        keys[first.flow] += rng.randrange(1 << 45)
        order.put(first, keys[first.flow], "")
        other = rng.choice(list(keys)) if turn % 10 == 0 else rng.randrange(2_000)
        if other not in keys:
            keys[other] = first.key
            order.put(places[other], keys[other], "")
        elif turn % 10 == 0:
            order.drop(places[other])
            del keys[other]
        else:
            keys[other] += rng.randrange(-(1 << 40), 1 << 40)
            order.put(places[other], keys[other], "")
    assert len(order.unsorted.heap) < 500
    assert len(order.unsorted._far) < 500
    assert order.unsorted._num_entries <= 2 * order.size + 65


@pytest.mark.parametrize("seed", [2, 19, 31])
def test_looking_far_ahead_counts_every_entry(seed: int) -> None:
    """Where the buckets' width is due just then: what stood in the heap was not counted any more."""
    rng = random.Random(seed)
    order: FlowOrder[int] = FlowOrder()
    places = [Place(flow, flow) for flow in range(300)]
    for _ in range(4):
        for _ in range(rng.randrange(600)):
            place = rng.choice(places)
            order.put(place, rng.randrange(1 << rng.randrange(36, 60)), "")
        there = sorted((place.key, place.flow) for place in places if place.group is not None)
        limit = rng.choice((5, 50, 150))
        assert [(place.key, place.flow) for place in order.first_places(limit)] == there[:limit]
        order.check_invariants()


def test_flows_are_asked_one_by_one_in_order_though_they_need_the_same() -> None:
    queue = _queue_of({"a": 30, "b": 10, "c": 20, "d": 40})
    asked: list[str] = []

    def fits(flow: str, item: int) -> bool | None:
        asked.append(flow)
        return True if flow == "a" else None

    assert queue.select_one_by_one(fits, 0, limit=2) is None
    assert asked == ["b", "c"]
    pick = queue.select_one_by_one(fits, 0, limit=3)
    assert pick is not None
    assert (pick.item, pick.floor) == (0, 10 * TAG_SCALE), "the clock passes none of those that are queued"
    queue.dispatch(pick, 5)
    assert queue.virtual_time == 10 * TAG_SCALE
    queue.check_invariants()


def test_a_flow_apart_answers_for_itself_alone() -> None:
    queue = _queue_of({"a": 10, "b": 20})
    not_a = lambda item: True if item != 0 else None  # noqa: E731
    assert queue.select(not_a, 0) is None, "equal needs are placed alike"
    queue.set_apart("a", is_apart=True)
    pick = queue.select(not_a, 0)
    assert pick is not None
    assert (pick.item, pick.passed_over) == (1, 0)
    queue.check_invariants()
    queue.set_apart("a", is_apart=False)
    assert queue.select(not_a, 0) is None


def test_who_forgoes_begins_at_the_clock_and_never_falls() -> None:
    queue = _queue_of({"a": 10, "b": 100, "c": 100, "d": 500}, needs={"a": "much"})
    pick = queue.select(lambda item: True if item == 1 else None, 0)
    assert pick is not None
    queue.dispatch(pick, 1)
    assert queue.virtual_time == 100 * TAG_SCALE
    assert queue.tag_of("a") == 10 * TAG_SCALE
    for flow in ("a", "d", "unknown"):
        queue.forgo(flow)
    assert queue.tag_of("a") == 100 * TAG_SCALE
    assert queue.tag_of("d") == 500 * TAG_SCALE
    queue.check_invariants()


def test_a_newcomer_has_no_claim_to_work_that_was_done_beyond_reservations() -> None:
    """Long generations go on and on behind small reservations, and nothing is dispatched meanwhile."""
    queue: FairQueue[str, int] = FairQueue()
    for item in range(2):
        queue.push(item, "hog", share=Share(1), need=1, rank=Rank(0, 0, item))
    pick = queue.select(lambda _: True, 0)
    assert pick is not None
    queue.dispatch(pick, 10)
    queue.count("worker", {"hog": 1_000}, lambda _: Share(1))
    queue.push(2, "newcomer", share=Share(1), need=1, rank=Rank(0, 0, 2))
    assert queue.tag_of("newcomer") == queue.tag_of("hog") == 1_000 * TAG_SCALE
    queue.count("worker", {"hog": 1_010}, lambda _: Share(1))
    queue.push(3, "another", share=Share(1), need=1, rank=Rank(0, 0, 3))
    assert queue.tag_of("another") == 1_000 * TAG_SCALE, "level with who is least"
    queue.check_invariants()


def test_a_newcomer_does_not_pay_for_what_others_have_only_reserved() -> None:
    queue: FairQueue[str, int] = FairQueue()
    for item in range(3):
        queue.push(item, "hog", share=Share(1), need=1, rank=Rank(0, 0, item))
    for _ in range(2):
        pick = queue.select(lambda _: True, 0)
        assert pick is not None
        queue.dispatch(pick, 100)
    queue.count("worker", {"hog": 130}, lambda _: Share(1))
    queue.push(3, "newcomer", share=Share(1), need=1, rank=Rank(0, 0, 3))
    assert queue.tag_of("newcomer") == 130 * TAG_SCALE
    assert queue.tag_of("hog") == 200 * TAG_SCALE
