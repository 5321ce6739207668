"""The fair queue: the properties of fair_queue_suite, mutants that these must catch, and the class's own contract."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared import fair_queue
from manylora_shared.fair_queue import TAG_SCALE, FairQueue

from tests.properties import fair_queue_suite as suite

NUM_SEEDS = 400


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), num_actions=st.integers(1, 120))
def test_any_schedule_stays_within_the_bound(seed: int, num_actions: int) -> None:
    suite.random_schedule(FairQueue, seed, num_actions)


def test_the_bound_is_not_slack() -> None:
    worst = max(suite.random_schedule(FairQueue, seed).worst for seed in range(150))
    print(f"largest spread / bound over 150 schedules: {worst:.2f}")
    assert 0.5 < worst <= 1.0


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


def test_equal_histories_give_equal_choices() -> None:
    for seed in range(20):
        first = suite.random_schedule(FairQueue, seed)
        assert suite.random_schedule(FairQueue, seed).dispatched == first.dispatched


Flow = fair_queue._Flow[str, int]


class NoLift(FairQueue[str, int]):
    def _lift(self, flow: Flow) -> None:
        pass


class LiftToTheLeastOfTheOthers(FairQueue[str, int]):
    def _lift(self, flow: Flow) -> None:
        others = [f.tag for f in self._flows.values() if f.num_queued and f is not flow]
        flow.settled += max(0, min(others, default=0) - flow.tag)


class ChargeAfter(FairQueue[str, int]):
    def _reserve(self, flow: Flow, item: int, cost: int) -> None:
        pass


class ForgottenRefund(FairQueue[str, int]):
    def _refund(self, flow: Flow, item: int) -> None:
        left = flow.unspent.pop(item, 0)
        flow.reserved -= left
        flow.settled += left * flow.inverse


class DoubleRefund(FairQueue[str, int]):
    def _refund(self, flow: Flow, item: int) -> None:
        left = flow.unspent.pop(item, 0)
        flow.reserved -= left
        flow.settled -= left * flow.inverse


class StoppedClock(FairQueue[str, int]):
    def _advance_clock(self, tag: int) -> None:
        pass


class FollowingClock(FairQueue[str, int]):
    """The clock falls with the tag of whoever was chosen last."""

    def _advance_clock(self, tag: int) -> None:
        self._clock = tag


class WeightsIgnored(FairQueue[str, int]):
    def push(self, item: int, flow: str, *, weight: int, need: object, order: int, priority: int = 0) -> None:
        super().push(item, flow, weight=1, need=need, order=order, priority=priority)

    def charge(self, flow: str, cost: int, *, weight: int) -> None:
        super().charge(flow, cost, weight=1)


class ReservationsKept(FairQueue[str, int]):
    """Work is charged on top of its own reservation."""

    def _spend(self, flow: Flow, cost: int) -> None:
        pass


MUTANTS = [
    NoLift,
    LiftToTheLeastOfTheOthers,
    ChargeAfter,
    ForgottenRefund,
    DoubleRefund,
    StoppedClock,
    FollowingClock,
    WeightsIgnored,
    ReservationsKept,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_the_suite_notices(mutant: type[FairQueue[str, int]]) -> None:
    with pytest.raises(AssertionError):
        suite.run_suite(mutant, range(NUM_SEEDS))


@pytest.mark.parametrize(
    "mutant", [NoLift, LiftToTheLeastOfTheOthers, StoppedClock, ForgottenRefund, DoubleRefund], ids=lambda m: m.__name__
)
def test_random_schedules_alone_notice(mutant: type[FairQueue[str, int]]) -> None:
    def run() -> None:
        for seed in range(NUM_SEEDS):
            suite.random_schedule(mutant, seed)

    with pytest.raises(AssertionError):
        run()


def test_inside_a_flow_priority_then_order() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for order, (item, priority) in enumerate([("a", 0), ("b", 5), ("c", 5), ("d", -1)]):
        queue.push(item, "flow", weight=1, need=1, order=order, priority=priority)
    started = []
    while (item := queue.front()) is not None:
        queue.dispatch(item, 1)
        started.append(item)
    assert started == ["b", "c", "a", "d"]


def test_a_flow_whose_first_item_fits_nowhere_keeps_its_tag_and_blocks_nobody() -> None:
    queue: FairQueue[str, str] = FairQueue()
    queue.push("large", "patient", weight=1, need=8, order=0)
    queue.push("behind", "patient", weight=1, need=1, order=1)
    for i in range(10):
        queue.push(f"small{i}", "other", weight=1, need=1, order=2 + i)
    tag = queue.tag_of("patient")
    for i in range(10):
        assert queue.select(lambda item: item != "large") == f"small{i}"
        queue.dispatch(f"small{i}", 10)
        assert queue.front() == ("large" if i or queue.tag_of("other") > tag else f"small{i}")
    assert queue.select(lambda item: item != "large") is None
    assert queue.tag_of("patient") == tag
    queue.check_invariants()


def test_removal_of_a_first_item_brings_up_the_next() -> None:
    queue: FairQueue[str, str] = FairQueue()
    queue.push("a", "flow", weight=1, need=4, order=0)
    queue.push("b", "flow", weight=1, need=1, order=1)
    queue.remove("a")
    queue.check_invariants()
    assert queue.select(lambda _: True) == "b"
    queue.remove("b")
    assert queue.num_flows == 0
    queue.check_invariants()


def test_charges_name_flows_and_need_no_item() -> None:
    queue: FairQueue[str, str] = FairQueue()
    queue.push("a", "known", weight=1, need=1, order=0)
    queue.charge("stranger", 10, weight=2)
    assert queue.tag_of("stranger") - queue.virtual_time == 10 * TAG_SCALE // 2
    assert queue.num_flows == 2
    queue.check_invariants()


def test_a_new_weight_counts_for_what_is_reserved_and_later() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for i in range(3):
        queue.push(f"{i}", "flow", weight=1, need=1, order=i)
    queue.dispatch("0", 100)
    queue.charge("flow", 40, weight=1)
    assert queue.tag_of("flow") == 100 * TAG_SCALE
    queue.set_weight("flow", 4)
    assert queue.tag_of("flow") == 40 * TAG_SCALE + 60 * TAG_SCALE // 4
    queue.charge("flow", 60, weight=4)
    assert queue.tag_of("flow") == 40 * TAG_SCALE + 60 * TAG_SCALE // 4
    queue.check_invariants()


def test_state_stays_with_the_active_flows() -> None:
    queue: FairQueue[int, int] = FairQueue()
    queue.push(-1, -1, weight=1, need=1, order=0)
    queue.push(-2, -1, weight=1, need=1, order=0)
    queue.dispatch(-1, 1)
    for i in range(5_000):
        queue.push(i, i, weight=1, need=i % 3, order=i)
        while queue.front() is not None and queue.num_queued > 1:
            item = queue.select(lambda item: item >= 0)
            assert item is not None
            queue.dispatch(item, 5)
            queue.charge(i, 3, weight=1)
            queue.close(item)
        if i % 100 == 0:
            item = queue.select(lambda item: item == -2)
            assert item == -2
            queue.dispatch(-2, 50)
            queue.charge(-1, 50, weight=1)
            queue.close(-2)
            queue.push(-2, -1, weight=1, need=1, order=0)
    queue.check_invariants()
    assert queue.num_flows < 300
