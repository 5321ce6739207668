"""The moves between sequences with blocks and those without."""

from __future__ import annotations

from manylora_worker.kinds.sequence import SequenceStatus

from tests.worker.pure.rooms import Rooms, compute, group_of, request_of


def test_those_that_wait_stand_oldest_first() -> None:
    rooms = Rooms()
    for arrival in (3, 1, 2):
        rooms.parking.enqueue(group_of(request_of(f"r{arrival}"), arrival).sequences[0])
    assert [sequence.group.arrival for sequence in rooms.parking.waiting] == [1, 2, 3]


def test_who_is_admitted_has_the_blocks_of_all_its_tokens() -> None:
    rooms = Rooms()
    sequence = rooms.waiting(prompt=10)
    rooms.parking.admit(sequence)
    assert (sequence.status, len(sequence.block_table)) == (SequenceStatus.PREFILL, 3)
    assert (list(rooms.parking.parked), list(rooms.parking.waiting)) == ([sequence], [])


def test_who_is_evicted_is_computed_again_and_not_charged_again() -> None:
    rooms = Rooms()
    sequence = rooms.parked(prompt=10)
    compute(sequence, 6)
    rooms.parking.begin_plan()
    rooms.parking.evict(sequence)
    rooms.check_invariants()
    assert (sequence.status, sequence.num_computed_tokens, sequence.num_charged_tokens) == (
        SequenceStatus.WAITING,
        0,
        6,
    )
    assert (rooms.pool.num_free, list(rooms.parking.waiting), rooms.parking.evicted) == (20, [sequence], [sequence])
    assert sequence.group.num_evictions == 1
    assert sequence.num_new_tokens(10) == 4
    rooms.parking.begin_plan()
    assert rooms.parking.evicted == []


def test_without_host_memory_giving_up_blocks_is_an_eviction() -> None:
    rooms = Rooms()
    sequence = rooms.parked()
    rooms.parking.swap_or_evict(sequence)
    assert (rooms.parking.evicted, rooms.parking.swapped) == ([sequence], [])


def test_further_choices_share_the_prompts_blocks_and_draw_their_own_first_token() -> None:
    rooms = Rooms()
    leader, *others = group_of(request_of(prompt=8, n=3)).sequences
    rooms.parking.enqueue(leader)
    rooms.parking.admit(leader)
    compute(leader, 8)
    rooms.parking.fork(leader, others)
    rooms.check_invariants()
    for other in others:
        assert other.block_table == leader.block_table
        assert (other.status, other.num_uncomputed_tokens) == (SequenceStatus.PREFILL, 1)
        assert other in rooms.parking.parked
    assert rooms.pool.num_free == 18


def test_whoever_leaves_keeps_its_blocks_until_they_are_released() -> None:
    rooms = Rooms()
    parked, waiting = rooms.parked(), rooms.waiting()
    assert rooms.parking.leave(waiting)
    assert rooms.parking.leave(parked)
    assert not rooms.parking.leave(parked)
    assert (len(rooms.parking.parked), len(rooms.parking.waiting), rooms.pool.num_free) == (0, 0, 18)
    rooms.parking.release_blocks(parked)
    assert rooms.pool.num_free == 20


def test_sequences_that_could_decode_are_counted_as_they_leave_for_a_slot() -> None:
    rooms = Rooms()
    decoding, prefilling = rooms.parked(), rooms.parked()
    decoding.move_to(SequenceStatus.DECODE)
    paused = rooms.parked()
    paused.move_to(SequenceStatus.DECODE)
    rooms.queue.pause(paused, is_parked=True)
    rooms.parking.count_ready_decodes()
    assert rooms.parking.ready_decodes == 1
    rooms.parking.leave_for_slot(prefilling, 8)
    assert rooms.parking.ready_decodes == 1
    rooms.parking.leave_for_slot(decoding, 9)
    assert (rooms.parking.ready_decodes, len(decoding.block_table)) == (0, 3)


def test_each_plan_is_a_step_later() -> None:
    rooms = Rooms()
    first = rooms.parked()
    rooms.parking.begin_plan()
    rooms.parking.begin_plan()
    assert rooms.parked().parked_at == first.parked_at + 2
