"""What stands in a sequence's block table: what it takes, shares, finds cached, and copies before it writes."""

from __future__ import annotations

from tests.worker.pure.rooms import A, Rooms, compute, group_of, request_of


def test_blocks_are_taken_for_what_they_will_hold_and_not_twice() -> None:
    rooms = Rooms()
    sequence = rooms.waiting(prompt=9)
    assert rooms.tables.missing(sequence, 9) == 3
    rooms.tables.extend(sequence, 9)
    assert len(sequence.block_table) == 3
    compute(sequence, 9)
    assert rooms.tables.missing(sequence, 12) == 0, "the last block is not full"
    assert rooms.tables.missing(sequence, 13) == 1


def test_a_shared_block_is_copied_before_it_is_written_by_all_but_the_last() -> None:
    rooms = Rooms()
    leader, other = group_of(request_of(prompt=6, n=2)).sequences
    rooms.tables.extend(leader, 6)
    compute(leader, 6)
    rooms.tables.share(leader, other, 5)
    assert other.block_table == leader.block_table
    assert other.num_computed_tokens == 5
    assert rooms.tables.missing(other, 6) == 1, "the block of its last prompt token is the leader's too"
    shared = other.block_table[1]
    rooms.tables.extend(other, 6)
    assert other.block_table[0] == leader.block_table[0]
    assert len(other.block_table) == 2
    assert rooms.pool.pending_copies() == [(shared, other.block_table[1])]
    assert rooms.tables.missing(leader, 7) == 0, "it writes in place: it is alone there now"
    rooms.check_invariants()


def test_what_is_cached_is_not_taken_anew() -> None:
    rooms = Rooms(has_cache=True)
    first = rooms.parked(prompt=9)
    rooms.pool.commit(rooms.pool.take_work())
    compute(first, 9)
    rooms.prefixes.publish(first, 0, 9)
    second = rooms.waiting(prompt=9)
    assert rooms.tables.fill(second) == 2
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert rooms.pool.held_by(A) == 4


def test_who_loses_its_blocks_comes_back_as_another() -> None:
    rooms = Rooms()
    sequence = rooms.parked()
    before = sequence.holding_id
    rooms.tables.lose(sequence)
    assert (sequence.block_table, rooms.pool.num_free) == ([], 20)
    assert sequence.holding_id > before
