"""Whose blocks a sequence gets: its own tenant's first, then of who is above its bound or ahead, never of a reserve."""

from __future__ import annotations

from manylora_shared.fairness.costs import QUANTUM_TOKENS
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.planning.reclaim import Reclaim, Room, least_recent
from manylora_worker.planning.slots import Slots

from tests.worker.pure.rooms import A, B, Rooms, compute


def reclaim_of(rooms: Rooms) -> Reclaim:
    rest = rooms.queue.fair, rooms.parking.parked, rooms.queue.paused, Slots(4, QUANTUM_TOKENS)
    return Reclaim(rooms.pool, rooms.shares, rooms.swapper, *rest)


def room(rooms: Rooms, taker: Sequence, num_blocks: int, *, is_beside_others: bool = False) -> Room | None:
    return reclaim_of(rooms).room(
        taker, num_blocks, num_joined=0, may_evict=True, may_swap=False, is_beside_others=is_beside_others
    )


def test_free_blocks_cost_nobody_anything() -> None:
    rooms = Rooms(num_blocks=10)
    rooms.parked(A)
    found = room(rooms, rooms.waiting(B), 8)
    assert found == Room(8, [])


def test_beside_others_a_newcomer_leaves_some_blocks_free() -> None:
    rooms = Rooms(num_blocks=50)
    rooms.parked(A)
    taker = rooms.waiting(B)
    assert room(rooms, taker, 46, is_beside_others=True) == Room(46, [])
    assert room(rooms, taker, 47, is_beside_others=True) is None


def test_its_own_tenant_gives_first_and_the_least_recently_run_of_those_behind_it() -> None:
    rooms = Rooms(num_blocks=8)
    taker = rooms.parked(A)
    stale, recent, foreign = rooms.parked(A), rooms.parked(A), rooms.parked(B)
    recent.parked_at = 5
    found = room(rooms, taker, 2)
    assert found is not None
    assert list(found.victims) == [stale]
    assert foreign not in found.victims
    assert sorted([recent, stale], key=least_recent) == [stale, recent]


def test_an_older_one_of_its_own_is_not_taken_from() -> None:
    rooms = Rooms(num_blocks=4)
    rooms.parked(A)
    young = rooms.parked(A)
    assert room(rooms, young, 1) is None


def test_above_its_soft_share_a_tenant_gives_to_one_within_its_own() -> None:
    rooms = Rooms(num_blocks=6)
    rooms.shares.set(A, TenantShare(soft_blocks=2))
    victims = [rooms.parked(A) for _ in range(3)]
    taker = rooms.waiting(B)
    assert room(rooms, taker, 2) is None, "they have done nothing yet with what they were given"
    for victim in victims:
        victim.has_worked = True
    found = room(rooms, taker, 2)
    assert found is not None
    assert list(found.victims) == [victims[-1]], "the youngest"


def test_a_reserve_is_taken_from_nobody_and_taken_by_its_owner_from_anybody() -> None:
    rooms = Rooms(num_blocks=8)
    rooms.shares.set(A, TenantShare(soft_blocks=0, reserve_blocks=2))
    kept, *others = rooms.parked(A), rooms.parked(B), rooms.parked(B), rooms.parked(B)
    for sequence in (kept, *others):
        sequence.has_worked = True
    taker = rooms.waiting(B)
    assert room(rooms, taker, 2) is None
    rooms.shares.set(A, TenantShare(soft_blocks=0))
    found = room(rooms, taker, 2)
    assert found is not None
    assert list(found.victims) == [kept], "it is above its soft share, and has no reserve any more"
    rooms.shares.set(A, TenantShare(reserve_blocks=4))
    found = room(rooms, rooms.waiting(A), 2)
    assert found is not None
    assert list(found.victims) == [others[-1]]


def test_past_its_hard_cap_a_tenant_gets_room_from_itself_alone() -> None:
    rooms = Rooms(num_blocks=20)
    rooms.shares.set(A, TenantShare(hard_blocks=4))
    old, young = rooms.parked(A), rooms.parked(A)
    found = room(rooms, old, 1)
    assert found is not None
    assert list(found.victims) == [young]
    assert room(rooms, young, 1) is None


def test_a_victim_in_a_step_keeps_its_blocks_and_is_waited_for() -> None:
    rooms = Rooms(num_blocks=4)
    old, young = rooms.parked(A), rooms.parked(A)
    compute(young, 4)
    young.num_steps_in_flight = 1
    reclaim = reclaim_of(rooms)
    assert reclaim.room(old, 1, num_joined=0, may_evict=True, may_swap=False, is_beside_others=True) is None
    assert reclaim.waits
    reclaim.begin_plan()
    assert not reclaim.waits
