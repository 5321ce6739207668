"""Whose turn it is: the order of flows, and what being paused or capped costs."""

from __future__ import annotations

from manylora_shared.ids import TenantId
from manylora_worker.kinds.sequence import Sequence, SequenceStatus

from tests.worker.pure.rooms import A, B, Rooms, group_of, request_of


def first(rooms: Rooms) -> Sequence:
    pick = rooms.queue.select(lambda item: item)
    assert pick is not None
    return rooms.queue.sequence(pick.item)


def run(rooms: Rooms, cost: int) -> Sequence:
    pick = rooms.queue.select(lambda item: item)
    assert pick is not None
    sequence = rooms.queue.sequence(pick.item)
    rooms.queue.start(pick, cost)
    assert sequence.item is None
    rooms.queue.push(sequence)  # before it is settled: its flow stays backlogged
    rooms.queue.settle(pick.item, cost)
    rooms.queue.check_invariants()
    return sequence


def test_flows_take_turns_by_what_they_were_charged() -> None:
    rooms = Rooms()
    for tenant in (A, B, A, B):  # two each: a flow with something queued is no newcomer when more comes
        rooms.waiting(tenant)
    assert [run(rooms, cost).tenant_id for cost in (30, 10, 10, 10)] == [A, B, B, B]
    assert run(rooms, 10).tenant_id == A, "as far as the other, and first in line"


def test_in_a_flow_one_with_blocks_goes_before_an_older_one_without() -> None:
    rooms = Rooms()
    old = rooms.waiting()
    young = rooms.parked()
    assert first(rooms) is young
    rooms.parking.admit(old)
    rooms.queue.requeue(old)
    assert first(rooms) is old


def test_a_paused_one_has_no_turn_and_comes_back() -> None:
    rooms = Rooms()
    sequence = rooms.waiting()
    sequence.group.is_paused = True
    rooms.queue.pause(sequence, is_parked=False)
    assert (len(rooms.queue), list(rooms.queue.paused)) == (0, [sequence])
    rooms.queue.requeue(sequence)
    assert len(rooms.queue) == 0, "where it stands does not matter while it is paused"
    sequence.group.is_paused = False
    rooms.queue.resume(sequence)
    assert first(rooms) is sequence
    assert rooms.queue.remove(sequence, is_parked=False)
    assert not rooms.queue.remove(sequence, is_parked=False)


def test_who_comes_while_its_reader_is_away_is_paused_from_the_start() -> None:
    rooms = Rooms()
    group = group_of(request_of())
    group.is_paused = True
    rooms.parking.enqueue(group.sequences[0])
    assert (len(rooms.queue), len(rooms.queue.paused)) == (0, 1)


def test_a_capped_flow_gets_no_credit_for_the_time_in_which_it_kept_itself() -> None:
    rooms = Rooms()
    other, capped = rooms.waiting(B), rooms.waiting(A)
    rooms.queue.note_capped(capped.flow)
    version = rooms.queue.capped_version
    assert version > 0
    rooms.queue.note_capped(capped.flow)
    assert rooms.queue.capped_version == version, "it is known"
    third = rooms.waiting(TenantId("c"))
    for _ in range(4):
        for sequence in (other, third):
            item = sequence.item
            pick = rooms.queue.select(lambda i, item=item: i if i == item else None)  # type: ignore[misc]
            assert pick is not None
            rooms.queue.start(pick, 100)
            rooms.queue.push(sequence)
            rooms.queue.settle(pick.item, 100)
    rooms.queue.end_capped(capped.flow)
    assert rooms.queue.capped_version == version + 1
    assert not rooms.queue.capped
    fair = rooms.queue.fair
    assert fair.tag_of(capped.flow) >= fair.virtual_time > 0


def test_a_sequence_of_a_capped_flow_that_goes_ends_that_only_if_it_may_have_been_the_one() -> None:
    rooms = Rooms()
    parked, waiting = rooms.parked(), rooms.waiting()
    rooms.queue.note_capped(parked.flow)
    rooms.queue.pause(parked, is_parked=True)
    assert rooms.queue.capped, "it had its blocks: another was held back"
    rooms.queue.pause(waiting, is_parked=False)
    assert not rooms.queue.capped
    assert waiting.status is SequenceStatus.WAITING
