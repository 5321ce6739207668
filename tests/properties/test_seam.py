"""Both implementations of the Fairness seam: the properties of fairness_suite, and equal choices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.reference import ReferenceQueue
from manylora_shared.fairness.seam import Fairness, Rank, Share

from tests.properties import fairness_suite as suite

BOTH = pytest.mark.parametrize("make", [ReferenceQueue, FairQueue])


def test_both_are_of_the_seam() -> None:
    queues: list[Fairness[str, int]] = [ReferenceQueue(), FairQueue()]
    for queue in queues:
        queue.push(0, "flow", share=Share(1), rank=Rank(0, 0, 0))
        assert queue.select(lambda item: "place") == (0, "place", 0, None)


@pytest.mark.long
@BOTH
def test_the_suite_passes(make: Any) -> None:
    suite.run_suite(make, range(40), plain=True)


@pytest.mark.long
@BOTH
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_actions=st.integers(1, 100), reweighs=st.booleans())
def test_any_schedule_stays_within_the_bound(make: Any, seed: int, num_actions: int, reweighs: bool) -> None:
    suite.random_schedule(make, seed, num_actions, plain=True, reweighs=reweighs)


@pytest.mark.long
def test_both_choose_alike(fair_schedules: int) -> None:
    suite.same_choices(ReferenceQueue, FairQueue, range(fair_schedules // 2))


@pytest.mark.wide
@pytest.mark.parametrize("rule", suite.SHARED_MUTANTS, ids=lambda rule: rule.__name__)
def test_the_suite_notices(rule: type) -> None:
    """In the reference; in the fast one: test_fair_queue.py."""
    with pytest.raises(AssertionError):
        suite.run_suite(suite.broken(rule, ReferenceQueue), range(100), plain=True)


@BOTH
@pytest.mark.parametrize("rule", suite.UNLIKE_MUTANTS, ids=lambda rule: rule.__name__)
def test_a_comparison_notices(rule: type, make: Any) -> None:
    unbroken = FairQueue if make is ReferenceQueue else ReferenceQueue
    with pytest.raises(AssertionError):
        suite.same_choices(suite.broken(rule, make), unbroken, range(200))


def test_who_is_charged_in_its_turn_comes_again() -> None:
    queue: ReferenceQueue[str, str] = ReferenceQueue()
    for order, item in enumerate(("a1", "b1", "a2", "c1")):
        queue.push(item, item[0], share=Share(1), rank=Rank(0, 0, order))
    seen = []
    for pick in queue.in_order():
        seen.append(pick.item)
        if pick.item == "a1":
            queue.dispatch(pick, 5)
    assert seen == ["a1", "b1", "c1", "a2"]
    queue.check_invariants()
