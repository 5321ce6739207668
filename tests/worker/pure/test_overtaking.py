"""Who may use the device past a request that finds no room there, and how often."""

from __future__ import annotations

from manylora_worker.adapters.overtaking import Overtaking
from manylora_worker.adapters.room import Standing

from tests.worker.pure.adapter_rooms import on_device, room_of, wanted
from tests.worker.pure.rooms import A, B


def test_its_own_tenants_others_pass_a_bounded_number_of_times() -> None:
    overtaking = Overtaking(room_of(), lambda: Standing({A: 9}, {A: 5}), 2)
    blocked, later = wanted("blocked", 8, a=1), wanted("later", 1, a=2)
    assert not overtaking
    overtaking.block(A, blocked)
    assert overtaking
    assert overtaking.is_allowed(A, later, counts=False)
    assert [overtaking.is_allowed(A, later) for _ in range(3)] == [True, True, False]


def test_who_came_before_it_overtakes_nobody() -> None:
    overtaking = Overtaking(room_of(), lambda: Standing({A: 9}, {A: 5}), 0)
    overtaking.block(A, wanted("blocked", 8, a=5))
    assert overtaking.is_allowed(A, wanted("earlier", 1, a=4))
    assert not overtaking.is_allowed(A, wanted("later", 1, a=6))


def test_others_make_way_only_for_who_is_within_its_share_and_only_if_they_are_not() -> None:
    room = room_of()
    on_device(room, "x", 1, a=0.0)
    held = {A: 0, B: 9}
    overtaking = Overtaking(room, lambda: Standing(held, {A: 5, B: 5}), 0)
    overtaking.block(A, wanted("blocked", 4, a=1))
    theirs = wanted("theirs", 1, b=9)
    assert not overtaking.is_allowed(B, theirs), "it is above its share, and the blocked one's due"
    held[B] = 4
    assert overtaking.is_allowed(B, theirs)
    held[A] = 6
    overtaking.unblock(A, wanted("another", 1))
    assert overtaking


def test_the_first_in_a_tenants_queue_counts_and_keeps_its_count() -> None:
    overtaking = Overtaking(room_of(), lambda: Standing({A: 9}, {A: 5}), 1)
    first, second = wanted("first", 8, a=1), wanted("second", 8, a=2)
    overtaking.block(A, second)
    assert overtaking.is_allowed(A, wanted("later", 1, a=3))
    overtaking.block(A, first)
    assert not overtaking.is_allowed(A, wanted("later", 1, a=3)), "it was overtaken once already"
    overtaking.block(A, second)
    overtaking.unblock(A, second)
    assert overtaking, "the first is the one that is blocked"
    overtaking.unblock(A, first)
    assert not overtaking
