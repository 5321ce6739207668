"""The reference of the Fairness seam, rule by rule, in exact integers."""

from __future__ import annotations

import pytest
from manylora_shared.fairness.reference import ReferenceQueue
from manylora_shared.fairness.seam import TAG_SCALE, Pick, Rank, Share

Queue = ReferenceQueue[str, str]


def push(queue: Queue, item: str, flow: str = "", weight: int = 1) -> None:
    queue.push(item, flow or item[0], share=Share(weight), rank=Rank(0, 0, int(item[1:])))


def start(queue: Queue, reserve: int, *, at: str = "") -> str:
    pick: Pick[str, str] | None = queue.select(lambda item: item if not at or item == at else None)
    assert pick is not None
    queue.dispatch(pick, reserve)
    queue.check_invariants()
    return pick.item


def test_the_least_tag_is_next_and_ties_go_by_age() -> None:
    queue: Queue = ReferenceQueue()
    for item in ("b1", "a1", "a2", "b2"):
        push(queue, item)
    assert [start(queue, 10) for _ in range(4)] == ["b1", "a1", "b2", "a2"]


def test_a_cost_counts_by_weight_and_replaces_its_reservation() -> None:
    queue: Queue = ReferenceQueue()
    for item in ("a1", "a2"):
        push(queue, item, weight=4)
    start(queue, 100)
    assert queue.reserved_by("a") == 100
    assert queue.tag_of("a") == 100 * (TAG_SCALE // 4)
    queue.settle("a1", 12)
    assert (queue.reserved_by("a"), queue.tag_of("a")) == (0, 12 * (TAG_SCALE // 4))


def test_a_newcomer_begins_where_the_one_behind_all_others_has_settled() -> None:
    queue: Queue = ReferenceQueue()
    for item in ("a1", "a2", "a3", "b1", "b2", "b3"):
        push(queue, item)
    for item, cost in (("a1", 30), ("b1", 50)):
        start(queue, cost, at=item)
        queue.settle(item, cost)
    push(queue, "c1")
    assert queue.tag_of("c") == 30 * TAG_SCALE
    assert start(queue, 1, at="c1") == "c1"


def test_what_fits_nowhere_is_passed_over_and_says_so() -> None:
    queue: Queue = ReferenceQueue()
    push(queue, "a1")
    push(queue, "b1")
    pick: Pick[str, str] | None = queue.select(lambda item: item if item == "b1" else None)
    assert pick is not None
    assert (pick.item, pick.passed_over) == ("b1", "a1")
    assert queue.num_queued == 2, "nothing was changed"
    nothing: Pick[str, str] | None = queue.select(lambda item: None)
    assert nothing is None


def test_a_new_weight_leaves_the_tag_where_it_is() -> None:
    queue: Queue = ReferenceQueue()
    for item in ("a1", "a2"):
        push(queue, item)
    start(queue, 40)
    before = queue.tag_of("a")
    queue.set_share("a", Share(8))
    queue.check_invariants()
    assert queue.tag_of("a") == before
    queue.settle("a1", 8)
    assert queue.tag_of("a") == before - 40 * (TAG_SCALE // 8) + 8 * (TAG_SCALE // 8)


def test_who_forgoes_keeps_no_credit() -> None:
    queue: Queue = ReferenceQueue()
    for item in ("a1", "b1", "b2"):
        push(queue, item)
    start(queue, 70, at="b1")
    queue.settle("b1", 70)
    queue.forgo("a")
    assert queue.tag_of("a") == queue.tag_of("b") == 70 * TAG_SCALE


def test_when_nothing_is_left_nothing_is_remembered() -> None:
    queue: Queue = ReferenceQueue()
    push(queue, "a1")
    start(queue, 5)
    queue.settle("a1", 9)
    assert (queue.books, queue.virtual_time) == ({}, 9 * TAG_SCALE)
    assert queue.tag_of("a") == queue.virtual_time


def test_it_knows_no_boosts() -> None:
    queue: Queue = ReferenceQueue()
    with pytest.raises(AssertionError, match="boosts"):
        queue.push("a1", "a", share=Share(1, 0, 5), rank=Rank(0, 0, 1))
