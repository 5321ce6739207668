"""A fair queue that goes on where another one's snapshot ends. (fairness_suite does so in the midst of schedules.)"""

from __future__ import annotations

import pytest
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.queue_succession import restore, resume, take_snapshot
from manylora_shared.fairness.seam import Pick, Share

from tests.properties.fairness_suite import push, start


def test_a_successor_knows_what_its_predecessor_knew() -> None:
    old: FairQueue[str, int] = FairQueue()
    for flow, weight in (("a", 1), ("b", 3)):
        for i in range(20):
            push(old, 100 * weight + i, flow, i, weight=weight)
    for _ in range(6):
        start(old, 30)
    saved = take_snapshot(old)
    totals = {"a": 40, "b": 75}
    weights = {"a": Share(1), "b": Share(3)}
    old.count("w", totals, weights.__getitem__)
    new: FairQueue[str, int] = FairQueue()
    restore(new, saved)
    with pytest.raises(AssertionError):
        new.dispatch(Pick(0, None, 0, None), 1)
    for item, flow, left in saved.reserved:
        new.adopt(item, flow, share=weights[flow], reserve=left)
    assert len(new.count("w", totals, weights.__getitem__)) == 2
    for flow, weight in (("a", 1), ("b", 3)):
        for i in range(20):
            if 100 * weight + i not in [item for item, _, _ in saved.reserved]:
                push(new, 100 * weight + i, flow, i, weight=weight)
    resume(new)
    assert [new.tag_of(flow) for flow in "ab"] == [old.tag_of(flow) for flow in "ab"]
    assert [start(new, 30) for _ in range(20)] == [start(old, 30) for _ in range(20)]
    assert new.virtual_time == old.virtual_time
    new.check_invariants()


def test_whoever_comes_with_a_new_leader_begins_where_the_others_are() -> None:
    """A flow that the snapshot does not know, or knows as idle, gets nothing for the clock's being old."""
    old: FairQueue[str, int] = FairQueue()
    for i in range(10):
        push(old, i, "busy", i)
    for _ in range(3):
        queue_item = start(old, 10)
        old.settle(queue_item, 10)
    saved = take_snapshot(old)
    totals = {"busy": 5_000}
    new: FairQueue[str, int] = FairQueue()
    restore(new, saved)
    push(new, 99, "newcomer", 0)
    new.count("w", totals, lambda _: Share(1))
    for i in range(3, 10):
        push(new, i, "busy", i)
    resume(new)
    assert new.tag_of("newcomer") == new.tag_of("busy") == new.virtual_time
